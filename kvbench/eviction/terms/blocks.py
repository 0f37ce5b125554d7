"""Blocks of rows for arithmetic on a CPU. Buffers of one block stay in the processor's cache. Buffers for all rows
would need new memory pages at every call, which can take longer than the arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvbench.eviction.planned_device import on_gpu
from kvbench.lazy import torch

FLOATS = 1 << 18  # numbers of a block's largest buffer


def blocks(x: torch.Tensor, floats: int) -> Iterator[slice]:
    """Return the blocks of the rows of x [b, ...]; on a GPU one block has all rows. floats: how many numbers the
    largest buffer of the arithmetic holds per row."""
    rows = max(1, len(x) if on_gpu(x) else FLOATS // max(1, floats))
    return (slice(first, first + rows) for first in range(0, max(1, len(x)), rows))


def in_blocks(x: torch.Tensor, floats: int, compute: Callable[[slice], torch.Tensor]) -> torch.Tensor:
    """Return the results of `compute` for the `blocks` of the rows of x [b, ...], joined. floats: as for `blocks`."""
    results = [compute(block) for block in blocks(x, floats)]
    return results[0] if len(results) == 1 else torch.cat(results)
