"""The memory of an engine that generates answers for a training, planned as a run plans its cells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvbench import registry
from kvbench.engine import memory
from kvbench.engine.cache.layout import Lengths
from kvbench.engine.footprint import Footprint
from kvbench.engine.model.load import LoadedModel
from kvbench.engine.model.shape import ModelShape, shape_of_model
from kvbench.engine.plan import USABLE, cell_footprint
from kvbench.train.rehearsal import Parts

COLLECTING = "collecting answers"
SLOTS = 32  # answers that a training collects at once, where memory allows


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Answers that a recipe lets the model generate.

    Attributes:
        phase: words for it.
        method, budget, interval: under which the engine generates; budget None: with the full cache.
        slots: answers at once; longest: most tokens of a prompt and its answer.
    """

    phase: str
    method: Any
    budget: int | None
    interval: int
    slots: int
    longest: int

    def need(self, shape: ModelShape, device: torch.device, dtype: torch.dtype, total: int) -> Footprint:
        """Return the bytes of the engine. total: bytes of the device's memory."""
        return cell_footprint(
            shape,
            self.method,
            budget=self.budget,
            interval=self.interval,
            lengths=Lengths.of(self.longest),
            device=device,
            dtype=dtype,
            total=total,
        )[0]


def collecting(longest: int, questions: int) -> Generation:
    """Return the generation of a training's answers with the full cache."""
    full = registry.methods.get("full")()
    slots = min(SLOTS, questions)
    return Generation(phase=COLLECTING, method=full, budget=None, interval=128, slots=slots, longest=longest)


def slots_for(loaded: LoadedModel, generation: Generation) -> int:
    """Return how many answers a device generates at once: `slots` of the generation, or as many as fit its memory."""
    total = memory.total(loaded.device)
    need = generation.need(shape_of_model(loaded.model), loaded.device, loaded.dtype, total)
    return fitting(need, generation.slots, total, loaded.device)


def fitting(need: Footprint, slots: int, total: int, device: torch.device) -> int:
    """Return how many of these slots fit a device with `total` bytes; at least one."""
    return max(1, min(slots, need.fitting(int(total * USABLE[device.type]))))


def parts(need: Footprint, slots: int) -> Parts:
    """Return the bytes of an engine beside the weights, by part."""
    acting = need.at(slots) - need.weights - slots * (need.slot + need.step)
    return Parts({f"cache of {slots} slots": slots * need.slot, "a prompt and a step": acting + slots * need.step})
