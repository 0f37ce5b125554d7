"""State of torch's C++ side that a CUDA device needs and a CPU build lacks."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

REGISTRY, SLOTS, CUDA, META = "_ZN3c104impl26device_guard_impl_registryE", 21, 1, 14


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """Register a device guard for CUDA, and let wrapped parameters be moved, inside the block."""
    registry, guard = _guard()
    lift, swap = torch._C._only_lift_cpu_tensors(), torch.__future__.get_swap_module_params_on_conversion()
    registry[CUDA] = ctypes.addressof(guard)
    torch._C._set_only_lift_cpu_tensors(True)
    torch.__future__.set_swap_module_params_on_conversion(True)  # `Module.to` keeps parameter objects, tied ones too
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swap)
        torch._C._set_only_lift_cpu_tensors(lift)
        registry[CUDA] = None


@functools.cache
def _guard() -> tuple[Any, Any]:
    """Return torch's registry of device guards, and a guard for CUDA that does nothing.

    C++ looks the guard up for every index and `to`. It is a copy of the guard of "meta" with the virtual functions
    type(), exchangeDevice(device) and getDevice() replaced; a device is two bytes: type 1, index 0.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    registry = (ctypes.c_void_p * SLOTS).in_dll(library, REGISTRY)
    meta = ctypes.cast(registry[META], ctypes.POINTER(ctypes.c_void_p))
    virtual = (ctypes.c_void_p * 32)(*ctypes.cast(meta[0], ctypes.POINTER(ctypes.c_void_p))[:32])
    calls = (
        ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)(lambda this: CUDA),
        ctypes.CFUNCTYPE(ctypes.c_uint16, ctypes.c_void_p, ctypes.c_uint16)(lambda this, device: CUDA),
        ctypes.CFUNCTYPE(ctypes.c_uint16, ctypes.c_void_p)(lambda this: CUDA),
    )
    for place, call in enumerate(calls):
        virtual[place] = ctypes.cast(call, ctypes.c_void_p)
    guard = (ctypes.c_void_p * 2)(ctypes.addressof(virtual), 0)
    guard.kept = virtual, calls  # type: ignore[attr-defined]
    return registry, guard
