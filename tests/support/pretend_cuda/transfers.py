"""Pinned memory, and copies to the host that arrive only when the host has waited for them."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class Transfers:
    """Copies under way to the host, and pinned storages.

    A copy that does not block leaves its target as it was, or poisoned if newly made, until the host waits: a program
    that reads too soon gets wrong numbers here, as it may on a GPU.
    """

    def __init__(self) -> None:
        self.started = 0  # copies so far
        self._under_way: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._pinned: dict[int, StorageWeakRef] = {}

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._pinned[storage._cdata] = StorageWeakRef(storage)
        return tensor

    def pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned

    def start(self, target: torch.Tensor | None, source: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        """Begin a copy to the host; return the target, a new tensor if None."""
        if target is None:
            target = poison(torch.empty_like(source, dtype=options.get("dtype") or source.dtype))
        self._under_way.append((target, source.clone()))
        self.started += 1
        return target

    def complete(self, number: int | None = None) -> None:
        """Let the first `number` copies since the beginning arrive; None: all."""
        waiting = self.started - (self.started if number is None else number)
        arrived = max(0, len(self._under_way) - waiting)
        for target, source in self._under_way[:arrived]:
            target.copy_(source)
        del self._under_way[:arrived]


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with numbers that show when they are read."""
    if tensor.dtype.is_floating_point:
        return tensor.fill_(float("nan"))
    return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)
