"""The error for running out of memory, and freeing memory before a retry."""

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
        under_way: (document, sample) of the sequences being read or decoded; empty if the engine was not built yet.
        cause: first line of the allocator's message.
    """

    def __init__(self, error: BaseException, under_way: Iterable[Sequence] = ()) -> None:
        self.cause = faults.first_line(error)
        self.under_way = tuple((sequence.request.doc_id, sequence.sample) for sequence in under_way)
        super().__init__(f"out of memory ({self.cause}). Use fewer --slots, or a smaller --budget.")


def release(device: torch.device) -> None:
    """Collect garbage, and return torch's cached memory to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
