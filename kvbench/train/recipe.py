"""The interface of a recipe: the tensors that it trains, the loss of a step, and figures on held-out data.

The loop (`kvbench.train.loop`) provides the rest: optimiser, schedule, log, checkpoints, processes, weights file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from kvbench.engine.model.load import LoadedModel
from kvbench.engine.model.weights import Base, save_weights
from kvbench.errors import UserError, quote
from kvbench.train.traces import Trace

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings on which the losses of a training depend. A checkpoint fits only a training with equal settings."""

    steps: int
    lr: float  # peak of AdamW's rate: linear warm-up over `warmup` steps, then a cosine to `floor` of the peak
    warmup: int = 20
    floor: float = 0.1
    weight_decay: float = 0.0
    clip: float = 1.0  # largest norm of the gradient
    batch: int = 8  # items (traces, questions or examples) per step, over all processes
    seed: int = 0
    more: Mapping[str, Any] = field(default_factory=dict)  # the settings that only this recipe has


def drawing(seed: int, number: int) -> torch.Generator:
    """Return a random generator on the CPU, seeded with the training's seed and with a number.

    The number is, for example, that of a step or an epoch.
    """
    return torch.Generator().manual_seed((seed * 1_000_003 + number) % 2**63)


def draw_batch(items: Sequence[T], settings: Settings, step: int) -> list[T]:
    """Draw the items of a step's batch at random; an item may occur twice."""
    generator = drawing(settings.seed, step)
    return [items[i] for i in torch.randint(0, len(items), (settings.batch,), generator=generator).tolist()]


def with_gradient(loss: torch.Tensor, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return a loss with the same value and gradients, whose graph holds no activations of the model.

    The gradients with respect to `parameters` are computed now and stored in the graph.
    """
    parameters = list(parameters)
    slopes = torch.autograd.grad(loss, parameters, allow_unused=True)
    pulls = [((p - p.detach()) * slope).sum() for p, slope in zip(parameters, slopes) if slope is not None]
    return loss.detach() + torch.stack(pulls).sum()


def check_least(more: Mapping[str, Any], **least: float) -> None:
    """Raise UserError if a setting in `more` is below its smallest value in `least`; other settings are not checked."""
    for name, smallest in least.items():
        if (value := more.get(name, smallest)) < smallest:
            raise UserError(f"--opt {name} must be {smallest} or more; got {value:g}.")


def check_choices(more: Mapping[str, Any], **choices: Sequence[str]) -> None:
    """Raise UserError if a setting in `more` is not among its possible values in `choices`; others are not checked."""
    for name, known in choices.items():
        if (value := more.get(name, known[0])) not in known:
            need = " or ".join(known) if len(known) < 3 else f"one of {', '.join(known)}"
            raise UserError(f"--opt {name} must be {need}; got {quote(value)}.")


class Recipe(ABC):
    """The definition of one training: its trained tensors, its loss and its held-out figures.

    Attributes:
        name: as in ``kvbench train NAME``.
        kind: the kind of weights that the recipe writes (`kvbench.eviction.api.Weights`).
        figure: the held-out figure that training should improve; `higher`: whether larger is better.
        at_once: how many items of a batch a call of `loss` may get, to limit the memory of its graph; the loop adds up
            the gradients. None: the whole part of the batch that this process computes.
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
        """Raise UserError if a setting in `more` is invalid or does not fit the model.

        `prepare` calls it before the model answers questions.
        """
        return None

    @abstractmethod
    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the optimiser changes, by name."""

    @abstractmethod
    def loss(self, step: int, share: slice) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the mean loss of a part (`share`) of a step's batch, and further figures for the log.

        The log has the first process's figures. The loss must depend only on (settings, parameters, step, share), so
        that a resumed training reaches the same losses.
        """

    @abstractmethod
    def held_out(self) -> dict[str, float]:
        """Return figures that are measured on data which training never sees; `figure` names the most important one."""

    def after_step(self) -> None:
        """Change parameters after each step of the optimiser, for example clamp them; by default nothing changes."""
        return None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the weights file holds, by name."""
        return {name: tensor.detach() for name, tensor in self.parameters().items()}

    def card(self) -> dict[str, Any]:
        """Return the facts that only this recipe adds to the card of the weights, for example budget and interval."""
        return {}

    def write(self, out: Path, *, base: Base, made: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
        """Write the trained weights below the folder `out`; return their file or folder, and their card.

        made: facts about the training for the card.
        """
        path = out / f"{self.kind}.safetensors"
        return path, save_weights(path, self.kind, self.tensors(), base, made=made)


class TraceRecipe(Recipe):
    """The base class of recipes that train a method's weights on answers of a frozen model.

    Subclasses make the weights in `begin`.
    """

    def __init__(
        self, loaded: LoadedModel, settings: Settings, traces: Sequence[Trace], held_out: Sequence[Trace]
    ) -> None:
        super().__init__(settings)
        self.check(loaded, settings.more)
        loaded.model.requires_grad_(False)
        self.loaded, self.traces, self.test = loaded, traces, held_out
        self.begin()

    @abstractmethod
    def begin(self) -> None:
        """Make the tensors to train. The model, the settings and the traces are already set."""

    def batch(self, step: int, share: slice) -> list[Trace]:
        return draw_batch(self.traces, self.settings, step)[share]

    def card(self) -> dict[str, Any]:
        return {"traces": len(self.traces), "held_out": len(self.test)}
