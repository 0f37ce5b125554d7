"""What every learned method's training has in common: trained tensors, a loss at a step, a figure on held-out data.

    class Mine(Recipe):
        name = "mine"
        def loss(self, step, share): ...
        def held_out(self): ...

The loop (`kvbench.train.loop`) does the rest: optimiser, schedule, log, checkpoints, several processes, weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from kvbench.engine.model.load import LoadedModel
from kvbench.engine.model.weights import Base, save_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How long and how fast. Everything that changes the losses; a checkpoint belongs to one of these.

    Attributes:
        steps: optimiser steps.
        lr: peak learning rate of AdamW; linear warm-up over `warmup` steps, then a cosine to `floor` of the peak.
        clip: largest norm of the gradient.
        batch: samples of a step, over all processes.
        more: settings of the recipe itself.
    """

    steps: int
    lr: float
    warmup: int = 20
    floor: float = 0.1
    weight_decay: float = 0.0
    clip: float = 1.0
    batch: int = 8
    seed: int = 0
    more: Mapping[str, Any] = field(default_factory=dict)


def drawing(seed: int, number: int) -> torch.Generator:
    """Random numbers of a training's step or epoch `number`, on the CPU."""
    return torch.Generator().manual_seed((seed * 1_000_003 + number) % 2**63)


class Recipe(ABC):
    """One thing to train.

    Attributes:
        name: of the recipe, as ``kvbench train NAME``.
        kind: of the weights that come out (`kvbench.eviction.api.Weights`).
        figure: the held-out figure that training should improve; `higher` says in which direction.
        at_once: samples that one call of `loss` gets, where the graph of a whole batch would take too much memory;
            gradients add up. None: all that this process has of a batch.
    """

    name: ClassVar[str] = ""
    kind: ClassVar[str] = ""
    figure: ClassVar[str] = "loss"
    higher: ClassVar[bool] = False
    at_once: ClassVar[int | None] = None

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @classmethod
    def check(cls, loaded: LoadedModel, more: Mapping[str, Any]) -> None:
        """Raise UserError for settings that are none, or do not fit the model. Called before the model is asked."""
        return None

    @abstractmethod
    def parameters(self) -> dict[str, torch.Tensor]:
        """The leaf tensors that are trained, by name."""

    @abstractmethod
    def loss(self, step: int, share: slice) -> tuple[torch.Tensor, dict[str, float]]:
        """Mean loss of the samples `share` of a step's batch, and what the log shows beside it (the first process's).

        A function of (settings, parameters, step) alone: a resumed training must come to the same losses.
        """

    @abstractmethod
    def held_out(self) -> dict[str, float]:
        """Figures on data that training never sees, `figure` among them."""

    def after_step(self) -> None:
        """Called when the optimiser has moved the parameters: the place to put them back into their range."""
        return None

    def tensors(self) -> dict[str, torch.Tensor]:
        """What is written as weights."""
        return {name: tensor.detach() for name, tensor in self.parameters().items()}

    def card(self) -> dict[str, Any]:
        """What the weights' card says beside settings and figures: data, budget, interval, method options."""
        return {}

    def write(self, out: Path, *, base: Base, made: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
        """Leave what was trained under `out`; returns the file or folder and its card. made: how, for the card."""
        path = out / f"{self.kind}.safetensors"
        return path, save_weights(path, self.kind, self.tensors(), base, made=made)
