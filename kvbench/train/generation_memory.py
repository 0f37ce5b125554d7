"""Plans the memory of an engine that generates answers for a training, as a run plans the memory of its cells."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from kvbench import registry
from kvbench.engine import memory
from kvbench.engine.cache.layout import Lengths
from kvbench.engine.footprint import Footprint
from kvbench.engine.model.load import LoadedModel
from kvbench.engine.model.shape import ModelShape, shape_of_model
from kvbench.engine.plan import USABLE, cell_footprint
from kvbench.records import Sampling
from kvbench.train.rehearsal import Parts

COLLECTING = "collecting answers"
SLOTS = 32  # answers that a training generates at once before its first step, where memory allows


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """How the engine generates answers for a recipe.

    Attributes:
        phase: the name of this phase of the training in the plan.
        method, budget, interval: the method that evicts while the engine generates, its budget and its interval; a
            budget of None means the full cache.
        slots: how many answers the engine generates at once.
        longest: most tokens of a prompt plus its answer.
        sampling: how the engine draws tokens.
    """

    phase: str
    method: Any
    budget: int | None
    interval: int
    slots: int
    longest: int
    sampling: Sampling = field(default_factory=Sampling)

    def need(self, shape: ModelShape, device: torch.device, dtype: torch.dtype, total: int) -> Footprint:
        """Return the memory that the engine needs, fixed and per slot. total: bytes of the device's memory."""
        return cell_footprint(
            shape,
            self.method,
            budget=self.budget,
            interval=self.interval,
            lengths=Lengths.of(self.longest),
            device=device,
            dtype=dtype,
            total=total,
            samplings=(self.sampling,),
        )[0]


def collecting(longest: int, questions: int, sampling: Sampling) -> Generation:
    """Return how the engine generates the answers that a recipe trains on: with the full cache. longest: most tokens of
    a prompt plus its answer. questions: how many questions the engine answers."""
    return Generation(
        phase=COLLECTING,
        method=registry.methods.get("full")(),
        budget=None,
        interval=128,
        slots=min(SLOTS, questions),
        longest=longest,
        sampling=sampling,
    )


def slots_for(loaded: LoadedModel, generation: Generation) -> int:
    """Return how many answers the model's device can generate at once: `generation.slots`, or fewer if not all fit."""
    total = memory.total(loaded.device)
    need = generation.need(shape_of_model(loaded.model), loaded.device, loaded.dtype, total)
    return fitting(need, generation.slots, total, loaded.device)


def fitting(need: Footprint, slots: int, total: int, device: torch.device) -> int:
    """Return how many of `slots` slots fit into a device's memory of `total` bytes; 1 even if not one fits."""
    return max(1, min(slots, need.fitting(int(total * USABLE[device.type]))))


def parts(need: Footprint, slots: int) -> Parts:
    """Return the bytes that an engine with `slots` slots needs besides weights: for its cache, and for its work, which
    is to read a prompt and to take one step."""
    acting = need.at(slots) - need.weights - slots * (need.slot + need.step)
    return Parts({f"cache of {slots} slots": slots * need.slot, "a prompt and a step": acting + slots * need.step})
