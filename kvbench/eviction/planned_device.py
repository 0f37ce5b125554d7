"""Tells code whether to choose kernels and block sizes for a CPU or for a GPU.

The device of the tensors decides. For tensors on the meta device, whose bytes the memory plan counts, the plan's device
decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from kvbench.lazy import torch

_for_gpu: ContextVar[bool] = ContextVar("for_gpu", default=False)


@contextmanager
def planned_for(*, gpu: bool) -> Iterator[None]:
    """In a block `with planned_for(...)`, count meta tensors as tensors on a GPU if `gpu` is true, else on a CPU."""
    token = _for_gpu.set(gpu)
    try:
        yield
    finally:
        _for_gpu.reset(token)


def for_gpu() -> bool:
    """Return whether meta tensors count as tensors on a GPU (`planned_for`)."""
    return _for_gpu.get()


def on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on a GPU, or on the meta device while the memory plan is for a GPU."""
    return tensor.is_cuda or (tensor.is_meta and for_gpu())


def is_gpu(device: torch.device) -> bool:
    """Return whether a device is a GPU, or the meta device while the memory plan is for a GPU."""
    return device.type == "cuda" or (device.type == "meta" and for_gpu())


def enough(blocks: range, like: torch.Tensor) -> range:
    """Return the blocks that a loop must run: all of them, but on the meta device only the first.

    The memory plan counts bytes on the meta device, and one block is enough for this. All blocks must need the same
    memory, and free it when they end. like: a tensor on the device of the loop.
    """
    return blocks[:1] if like.is_meta else blocks


def occurs(mask: torch.Tensor) -> bool:
    """Return whether a mask has a True element; on the meta device True, so that the memory plan counts that case."""
    return mask.is_meta or bool(mask.any())
