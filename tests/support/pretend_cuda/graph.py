"""CUDA graphs of the pretended device: recorded ATen calls, repeated on the same memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten

from support.pretend_cuda.transfers import poison


class Graph:
    """The calls of one capture. Numbers of the host keep the values that they had while capturing."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []
        self.broken = False
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # written storages, copies
        self._made: list[torch.Tensor] = []

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        if func._schema.is_mutable:
            self.save(args, kwargs)

    def save(self, *values: Any) -> None:
        """Remember the content of every tensor, to be put back at the end of the capture."""
        for x in tree_flatten(values)[0]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in self._before:
                storage = x.untyped_storage()
                self._before[storage.data_ptr()] = storage, storage.clone()

    def after(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        taken, stored = {id(x) for x in tensors}, {x.untyped_storage().data_ptr() for x in tensors}
        outs = [x if isinstance(x, torch.Tensor) and id(x) not in taken else None for x in tree_flatten(out)[0]]
        self._made += [x for x in outs if x is not None and x.untyped_storage().data_ptr() not in stored]

        def again() -> None:
            for old, new in zip(outs, tree_flatten(func(*args, **kwargs))[0]):
                if old is not None:
                    old.copy_(new)

        self.calls.append(again)

    def end(self) -> None:
        """Nothing has run: put back what was written, and poison what was made."""
        for storage, before in self._before.values():
            storage.copy_(before)
        for x in self._made:
            poison(x)
        self._made.clear()
        self._before.clear()

    def run(self) -> None:
        with _disable_current_modes():
            for call in self.calls:
                call()


@contextlib.contextmanager
def recording(device: Any, graph: Graph, stream: Any = None) -> Iterator[None]:
    """Record every call in `graph`. As in torch, the end of a broken capture raises and keeps `stream`."""
    device.capturing, before = graph, device.stream
    device.stream = stream or before
    try:
        yield
    finally:
        device.capturing = None
        graph.end()
        if graph.broken:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        device.stream = before
