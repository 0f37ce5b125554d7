"""CPU tensors that say they are on the GPU, and the device that checks and counts every ATen call on them."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from support.pretend_cuda.allocations import Allocations
from support.pretend_cuda.counts import Kind, Ledger
from support.pretend_cuda.graph import Graph
from support.pretend_cuda.transfers import Transfers

aten = torch.ops.aten
CPU = torch.device("cpu")
MIXED = "Expected all tensors to be on the same device, but found at least two devices, {} and {}!"
# Composite operators that CUDA computes in one or two kernels; all other composite operators are counted in parts.
WHOLE = {aten.linear.default, aten.matmul.default, aten.scaled_dot_product_attention.default, aten.rms_norm.default}
NO_KERNEL = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_"),
    *("lift_fresh", "_unsafe_view", "_reshape_alias", "_local_scalar_dense", "is_pinned", "detach", "detach_"),
}
SYNCS = {
    *("_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount"),
    *("unique_dim", "_unique", "_unique2", "unique_consecutive", "unique_dim_consecutive"),
}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
current: list[Device] = []


class CudaTensor(torch.Tensor):
    """A CPU tensor that says it is on the GPU."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device) -> CudaTensor:
        about = dict(strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype, device=device)
        self = torch.Tensor._make_wrapper_subclass(cls, inner.shape, **about, requires_grad=False)
        self.inner = inner
        return self

    def __repr__(self) -> str:
        return f"{self.device}({self.inner!r})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.clone()

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")

    __array__ = numpy

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not current:
            raise RuntimeError("a tensor of the pretended CUDA device was used after its block ended")
        return current[-1].call(func, args, kwargs or {})


class Device(Ledger):
    """The pretended devices: compute ATen calls on CPU tensors, and count them. memory: bytes of each device.

    number: how many devices there are. `memory` belongs to the first of them, `memories` to all.
    """

    def __init__(self, memory: int, number: int = 1) -> None:
        super().__init__()
        self.memories = [Allocations(memory) for _ in range(number)]
        self.memory = self.memories[0]
        self.selected = 0  # index of the current device
        self.transfers = Transfers()
        self.capturing: Graph | None = None
        self.stream: Any = None
        self.refuses_waits = False
        self.reached = 0.0  # time of the newest work that the host has waited for

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        current.append(self)
        try:
            with _Mode(self):
                yield
        finally:
            current.remove(self)

    def sync(self, op: str) -> None:
        """The host waits until the device has finished its work."""
        self.refuse_in_capture(op)
        if self.refuses_waits and op != "synchronize":  # as torch, which does not notice this one
            raise RuntimeError("called a synchronizing CUDA operation")
        self.note("syncs", op)
        self.transfers.complete()
        self.reached = time.perf_counter()

    def set_sync_debug_mode(self, mode: int | str) -> None:
        self.refuses_waits = mode in (2, "error")

    def set_stream(self, stream: Any) -> None:
        self.stream = stream

    @contextlib.contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        before, self.stream = self.stream, stream or self.stream
        try:
            yield
        finally:
            self.stream = before

    def launch(self, op: str) -> None:
        self.note("launches", op)

    def refuse_in_capture(self, op: str) -> None:
        if self.capturing is not None:
            self.capturing.broken = True
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({op})")

    def call(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run one ATen call."""
        if _composite(func):
            with _Mode(self):
                return func.decompose(*args, **kwargs)
        flat, spec = tree_flatten((args, kwargs))
        device = next((x for x in flat if isinstance(x, torch.device)), None)
        ours = [x for x in flat if isinstance(x, CudaTensor)]
        if not ours and (device is None or device.type != "cuda"):
            return self._on_host(func, args, kwargs)
        name, to_cuda = func._schema.name.partition("::")[2], device is None or device.type == "cuda"
        if device is None:
            device = ours[0].device
        elif to_cuda and device.index is None:
            device = torch.device("cuda", self.selected)
        host = [x for x in flat if isinstance(x, torch.Tensor) and not isinstance(x, CudaTensor)]
        if name in ("_to_copy", "copy_"):
            later = self._copy(name, args, kwargs, to_cuda)
            if later:
                return self.transfers.start(args[0] if name == "copy_" else None, _inner(args[name == "copy_"]), kwargs)
        elif name in INDEXING:
            self._index(name, args)
        elif any(x.dim() > 0 or (name.endswith("_") and x is args[0]) for x in host):
            raise _mixed(name, ours[0].device, CPU)
        elif len(places := {x.device for x in ours}) > 1:
            raise _mixed(name, *sorted(places, key=str)[:2])
        if name in SYNCS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
            self.sync(name)
        if not func.is_view and name not in NO_KERNEL:
            self.launch(name)
        plain_args, plain_kwargs = tree_unflatten([self._plain(x) for x in flat], spec)
        plain_kwargs.pop("pin_memory", None)
        out = self._compute(func, plain_args, plain_kwargs)
        return self._wrap(func, out, ours, args, device) if to_cuda else out

    def _on_host(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        pin = kwargs.pop("pin_memory", False)
        out = func(*args, **kwargs)
        return self.transfers.pin(out) if pin else out

    def _plain(self, x: Any) -> Any:
        if isinstance(x, CudaTensor):
            return x.inner
        if isinstance(x, torch.Tensor) and self.capturing is not None:
            return x.clone()  # a number of the host: the graph keeps the value that it had while capturing
        return CPU if isinstance(x, torch.device) else x

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        graph = self.capturing if not func.is_view else None
        if graph is not None:
            graph.before(func, args, kwargs)
        run = ON_CPU.get(func, func)
        out = run(*args, **kwargs)
        if graph is not None:
            graph.after(run, args, kwargs, out)
        return out

    def _wrap(self, func: Any, out: Any, ours: list[CudaTensor], args: Sequence[Any], device: torch.device) -> Any:
        known = {id(x.inner): x for x in ours}
        for x in ours:
            if x.inner.shape != x.shape:
                raise NotImplementedError(f"{func} changes the shape of its argument in place")

        def wrap(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            if id(x) not in known:
                self.memories[device.index].note(x)
                return CudaTensor(x, device)
            return known[id(x)]

        # A view is an inference tensor exactly if its base is.
        normal = func.is_view and not ours[0].is_inference() and torch.is_inference_mode_enabled()
        with torch.inference_mode(False) if normal else contextlib.nullcontext():
            out = tree_map(wrap, out)
        if func is aten._to_copy.default and isinstance(args[0], torch.nn.Parameter):
            out._is_param = True  # `Module.to` swaps it with its parameter
        return out

    def _copy(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], to_cuda: bool) -> bool:
        """Count a copy between host and device; return whether it arrives on the host later."""
        source = args[0] if name == "_to_copy" else args[1]
        to_cuda = to_cuda if name == "_to_copy" else isinstance(args[0], CudaTensor)
        from_cuda = isinstance(source, CudaTensor)
        if from_cuda == to_cuda:
            return False
        direction: Kind = "h2d" if to_cuda else "d2h"
        self.refuse_in_capture(f"{direction} {name}")
        self.note(direction, name)
        free = kwargs.get("non_blocking", len(args) > 2 and args[2])
        if to_cuda or name == "copy_":  # `.to("cpu", non_blocking=True)` allocates pinned memory itself
            free = free and self.transfers.pinned(source if to_cuda else args[0])
        if not free:
            self.sync(f"{direction} {name}")
        return bool(free and not to_cuda)

    def _index(self, name: str, args: Sequence[Any]) -> None:
        if not isinstance(args[0], CudaTensor):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        where, values = args[0].device, args[2] if len(args) > 2 else None
        if isinstance(values, torch.Tensor) and values.device != where and (values.is_cuda or values.dim() > 0):
            raise _mixed(name, where, values.device)
        for index in args[1]:
            if isinstance(index, CudaTensor) and index.device != where:
                raise RuntimeError(
                    f"indices should be either on cpu or on the same device as the indexed tensor ({where})"
                )
            if index is not None and not isinstance(index, CudaTensor):
                self.note("h2d", f"{name} with a CPU index")
                self.sync(f"{name} with a CPU index")
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                self.sync(f"{name} with a mask")


class _Mode(TorchDispatchMode):
    """Hands calls without a `CudaTensor` to the device: constructors, and copies to it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # so that torch does not import dynamo for it

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.device.call(func, args, kwargs or {})


@functools.cache
def _composite(func: Any) -> bool:
    key = "CompositeImplicitAutograd"
    return (
        func not in WHOLE and func._can_decompose() and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key)
    )


def _mixed(name: str, one: torch.device, other: torch.device) -> RuntimeError:
    return RuntimeError(f"{MIXED.format(one, other)} (aten.{name})")


def _inner(x: torch.Tensor) -> torch.Tensor:
    return x.inner if isinstance(x, CudaTensor) else x


def _attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """The CPU has other backends than those a program chooses for CUDA."""
    with sdpa_kernel(list(SDPBackend.__members__.values())):
        return aten.scaled_dot_product_attention.default(*args, **kwargs)


def _histc(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """CUDA counts integers, the CPU does not."""
    return aten.histc.default(x.double(), *args, **kwargs).to(x.dtype)


ON_CPU: dict[Any, Any] = {aten.scaled_dot_product_attention.default: _attention, aten.histc.default: _histc}
