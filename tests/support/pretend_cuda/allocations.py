"""Live and peak bytes of the pretended device's tensors."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class Allocations:
    """Counts the bytes of noted storages until their last tensor goes. capacity: bytes that the device has."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.peak = capacity, 0
        self._bytes = 0  # of all storages noted since the last sweep, so at least of the live ones
        self._noted: dict[int, tuple[StorageWeakRef, int]] = {}  # a weak reference keeps the key from being reused

    def live(self) -> int:
        self._noted = {key: (ref, size) for key, (ref, size) in self._noted.items() if not ref.expired()}
        self._bytes = sum(size for _, size in self._noted.values())
        return self._bytes

    def note(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage once. Raises OutOfMemoryError when the device has no room for it."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._noted:
            return
        size = storage.nbytes()
        self._noted[storage._cdata] = StorageWeakRef(storage), size
        self._bytes += size
        if self._bytes > self.peak and self.live() > self.capacity:
            del self._noted[storage._cdata]
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size} bytes; {self.live()} of {self.capacity} are in use."
            )
        self.peak = max(self.peak, self._bytes)

    def reset_peak(self) -> None:
        self.peak = self.live()
