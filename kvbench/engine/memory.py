"""Running out of memory: the error that names the sequences under way, and giving memory back before another try."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch

from kvbench.console import faults
from kvbench.engine.sequence import Sequence
from kvbench.errors import SetupError


class OutOfMemory(SetupError):
    """The engine ran out of memory.

    Attributes:
        under_way: (document, sample) of the sequences under way; none while the engine was being made.
        cause: the allocator's own words.
    """

    def __init__(self, error: BaseException, under_way: Iterable[Sequence] = ()) -> None:
        self.cause = faults.first_line(error)
        self.under_way = tuple((sequence.request.doc_id, sequence.sample) for sequence in under_way)
        super().__init__(f"out of memory ({self.cause}). Use fewer --slots, or a smaller --budget.")


def release(device: torch.device) -> None:
    """Free unreferenced memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
