"""What torch asks CUDA for beside operators: the device's properties, streams, events, memory, graphs."""

from __future__ import annotations

import time
import types
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from support.pretend_cuda.allocations import Allocations
from support.pretend_cuda.graph import Graph, recording
from support.pretend_cuda.tensor import Device

SILENT = ("_lazy_init", "init", "_lazy_call", "empty_cache", "ipc_collect")
SILENT += ("manual_seed", "manual_seed_all")


def install(device: Device, patch: pytest.MonkeyPatch) -> None:
    """Replace torch.cuda's functions until `patch` is undone."""
    cuda = torch.cuda
    for name, value in _answers(len(device.memories)).items():
        patch.setattr(cuda, name, lambda *_, _value=value, **__: _value)
    for name in SILENT:
        patch.setattr(cuda, name, lambda *_, **__: None)  # each its own: dynamo wants to tell them apart
    patch.setattr(cuda, "synchronize", lambda *_, **__: device.sync("synchronize"))
    patch.setattr(cuda, "is_current_stream_capturing", lambda: device.capturing is not None)
    patch.setattr(cuda, "get_sync_debug_mode", lambda: 2 * device.refuses_waits)
    patch.setattr(cuda, "set_sync_debug_mode", device.set_sync_debug_mode)
    _memory(device, patch)
    _selection(device, patch)
    _streams(device, patch)
    _graphs(device, patch)
    _pinning(device, patch)
    patch.setattr(torch, "Generator", _Generator)
    patch.setattr(torch.autograd, "backward", _backward)
    patch.setattr(torch.autograd, "grad", _grad)


def _answers(number: int) -> dict[str, Any]:
    return {
        "is_available": True,
        "is_initialized": True,
        "device_count": number,
        "get_device_name": "pretended",
        "get_device_capability": (9, 0),
        "is_bf16_supported": True,
        "_is_in_bad_fork": False,
        "graph_pool_handle": (0, 0),
    }


def _memory(device: Device, patch: pytest.MonkeyPatch) -> None:
    cuda = torch.cuda

    def of(where: Any = None, *_: Any) -> Allocations:
        return device.memories[_index(where, device.selected)]

    def about(*where: Any) -> types.SimpleNamespace:
        names = {"name": "pretended", "major": 9, "minor": 0, "multi_processor_count": 132}
        return types.SimpleNamespace(**names, total_memory=of(*where).capacity)

    patch.setattr(cuda, "get_device_properties", about)
    for name in ("memory_allocated", "memory_reserved"):
        patch.setattr(cuda, name, lambda *where: of(*where).live())
    for name in ("max_memory_allocated", "max_memory_reserved"):
        patch.setattr(cuda, name, lambda *where: of(*where).peak)
    patch.setattr(cuda, "reset_peak_memory_stats", lambda *where: of(*where).reset_peak())
    patch.setattr(cuda, "mem_get_info", lambda *where: ((m := of(*where)).capacity - m.live(), m.capacity))


def _selection(device: Device, patch: pytest.MonkeyPatch) -> None:
    """The current device: `set_device`, and `with torch.cuda.device(...)`."""

    def select(where: Any) -> int:
        before, device.selected = device.selected, _index(where, device.selected)
        return before

    patch.setattr(torch.cuda, "current_device", lambda: device.selected)
    patch.setattr(torch.cuda, "set_device", select)
    patch.setattr(torch.cuda, "_exchange_device", select)  # of `torch.cuda.device`
    patch.setattr(torch.cuda, "_maybe_exchange_device", select)


def _index(where: Any, current: int) -> int:
    """Return a device's index. where: a device, its name, its index, or None for the current device."""
    if isinstance(where, int):
        return where
    index = None if where is None else torch.device(where).index
    return current if index is None else index


def _streams(device: Device, patch: pytest.MonkeyPatch) -> None:
    class Stream:
        """One queue for all streams: work is done when it is called."""

        cuda_stream, device = 0, torch.device("cuda", 0)

        def __init__(self, *_: Any, **__: Any) -> None: ...
        def wait_event(self, event: Any) -> None: ...
        def wait_stream(self, stream: Any) -> None: ...

        def record_event(self, event: Any = None) -> Any:
            event = event or Event()
            event.record(self)
            return event

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            device.sync("stream synchronize")

    class Event:
        """A mark in the queue. `synchronize` and `query` let the copies that were started before it arrive.

        Two marks give the time between them only after the host has waited for the later one, as on a GPU.
        """

        def __init__(self, enable_timing: bool = False, **_: Any) -> None:
            self._copies, self._time, self._timing = 0, 0.0, enable_timing

        def record(self, stream: Any = None) -> None:
            self._copies, self._time = device.transfers.started, time.perf_counter()

        def wait(self, stream: Any = None) -> None: ...

        def query(self) -> bool:
            device.refuse_in_capture("event query")
            self._reach()
            return True

        def synchronize(self) -> None:
            device.refuse_in_capture("event synchronize")
            device.note("waits", "event synchronize")
            self._reach()

        def _reach(self) -> None:
            device.transfers.complete(self._copies)
            device.reached = max(device.reached, self._time)

        def elapsed_time(self, end: Any) -> float:
            if not (self._timing and end._timing):
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            if device.reached < end._time:
                raise RuntimeError("CUDA error: device not ready")
            return float(1000 * (end._time - self._time))

    patch.setattr(torch.cuda, "Stream", Stream)
    patch.setattr(torch.cuda, "Event", Event)
    device.stream = default = Stream()
    patch.setattr(torch.cuda, "current_stream", lambda *_: device.stream)
    patch.setattr(torch.cuda, "default_stream", lambda *_: default)
    patch.setattr(torch.cuda, "set_stream", device.set_stream)
    patch.setattr(torch.cuda, "stream", device.on_stream)


def _graphs(device: Device, patch: pytest.MonkeyPatch) -> None:
    class CUDAGraph(Graph):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()

        def replay(self) -> None:
            device.launch("graph")
            self.run()

        def reset(self) -> None:
            self.calls.clear()

        def pool(self) -> tuple[int, int]:
            return (0, 0)

    patch.setattr(torch.cuda, "CUDAGraph", CUDAGraph)
    patch.setattr(torch.cuda, "graph", lambda graph, pool=None, stream=None: recording(device, graph, stream))


def _pinning(device: Device, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.Tensor, "pin_memory", lambda self, *_: device.transfers.pin(self.clone()))
    patch.setattr(torch.Tensor, "is_pinned", lambda self, *_: device.transfers.pinned(self))


class _Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> torch.Generator:
        return super().__new__(cls, "cpu")


def _grad(outputs: torch.Tensor, inputs: Iterable[torch.Tensor], *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
    """torch.autograd.grad: zeros, as `_backward` gives them."""
    return tuple(torch.zeros_like(tensor) for tensor in inputs)


def _backward(tensors: Any, *_: Any, **__: Any) -> None:
    """torch.autograd.backward: autograd's engine needs a real device, so every leaf gets a gradient of zeros."""
    todo, seen = [x.grad_fn for x in ([tensors] if isinstance(tensors, torch.Tensor) else tensors)], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable") and node.variable.grad is None:
            node.variable.grad = torch.zeros_like(node.variable)
        todo += [parent for parent, _ in node.next_functions]
