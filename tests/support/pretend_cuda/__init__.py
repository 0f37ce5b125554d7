"""One or more pretended CUDA devices: run the ``--device cuda`` paths of a program on a machine without a GPU.

    with pretended_cuda() as device:
        loaded = prepare(model.to("cuda"), tokenizer)
        steps = device.watch(Engine, "_step")
        ...                                # any code with device="cuda"
    assert steps[-1].syncs == 0, device.report()

Tensors made on "cuda:N" wrap CPU tensors and report that device. Every ATen call is checked as CUDA checks it,
computed on the CPU, and counted (`counts.Count`):

    mixed devices   raise CUDA's own RuntimeError, two GPUs too; 0-dim CPU tensors may join, CPU indices are copied and
                    counted
    syncs           the host waits for the device: .item(), bool(), .tolist(), .cpu(), nonzero, boolean indices,
                    blocking copies from or to the host, synchronize(); `report()` names the file and line of each
    waits           the host waits for an event; copies to the host that do not block arrive no sooner
    launches        ATen calls that are neither views nor allocations: a lower bound of kernels
    memory          live and peak bytes of tensors; beyond `pretended_cuda(memory=...)` OutOfMemoryError is raised
    CUDA graphs     `torch.cuda.graph` records; a sync or a host copy inside raises; nothing that is written inside
                    is visible before `replay()`, which runs the recorded calls on the same memory as one launch
    Triton          kernels run in Triton's interpreter on the wrapped tensors, one launch each; tensors must be on the
                    current device; set TRITON_INTERPRET=1 before the module that defines the kernels is imported

The device proves neither numerics nor speed of a GPU: sums have the CPU's order. `backward` and `grad` give zeros,
because autograd's engine needs a real device: a training step shows its devices and syncs, not what it learns. Copies
from pinned memory happen at once. Not for several threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from support.pretend_cuda import driver, internals, interpreter
from support.pretend_cuda.counts import Count
from support.pretend_cuda.tensor import CudaTensor, Device

__all__ = ["Count", "CudaTensor", "Device", "pretended_cuda"]

TESTED = ("2.13",)  # torch versions; the guard's virtual functions and some private names may differ in others


@contextlib.contextmanager
def pretended_cuda(memory: int = 141 * 10**9, devices: int = 1) -> Iterator[Device]:
    """Pretend CUDA devices of `memory` bytes each inside the block. Skips the test where this torch cannot."""
    if torch.cuda.is_available():
        pytest.skip("a real CUDA device is here; the pretended device would hide it")
    if not torch.__version__.startswith(TESTED):
        pytest.skip(
            f"the pretended CUDA device depends on torch's internals: {', '.join(TESTED)}, not {torch.__version__}"
        )
    device = Device(memory, devices)
    with pytest.MonkeyPatch.context() as patch:
        device.patch = patch
        driver.install(device, patch)
        interpreter.install(device, patch)
        with internals.prepared(), device.active():
            yield device
