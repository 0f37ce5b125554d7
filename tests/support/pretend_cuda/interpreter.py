"""Triton kernels of the pretended device, which run in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from support.pretend_cuda.tensor import CudaTensor, Device


def install(device: Device, patch: pytest.MonkeyPatch) -> None:
    """Let interpreted kernels take wrapped tensors, count one launch each, and be captured. No-op without triton."""
    try:
        from triton.runtime.interpreter import GridExecutor
    except ImportError:
        return
    run = GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        for x in (*args, *kwargs.values()):
            if isinstance(x, torch.Tensor) and (not isinstance(x, CudaTensor) or x.device.index != device.selected):
                raise ValueError(
                    "Pointer argument cannot be accessed from Triton (cpu tensor, or one of another device?)"
                )
        args, kwargs = tree_map(lambda x: x.inner if isinstance(x, CudaTensor) else x, (args, kwargs))
        device.launch("triton")
        with _disable_current_modes():
            if device.capturing is not None:
                device.capturing.save(args, kwargs)
                device.capturing.calls.append(lambda: run(self, *args, **kwargs))
            run(self, *args, **kwargs)

    patch.setattr(GridExecutor, "__call__", launch)
