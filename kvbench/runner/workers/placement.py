"""Where the jobs of a run are executed, as the user chose it. Imports no torch until a run begins."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbench.errors import UserError
from kvbench.runner.workers.executor import Executor, Order
from kvbench.runner.workers.local import VISIBLE, LocalExecutor

if TYPE_CHECKING:
    import torch

NAMES = ("local",)
MOST = 4096  # workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the jobs of a run are executed.

    name: one of `NAMES`. workers: how many; None: one per GPU that this process sees, if the device is CUDA without a
    number, else one.
    """

    name: str = "local"
    workers: int | None = None

    def alone(self) -> Placement:
        """Return the placement of a run whose model is divided among all GPUs: this process executes it.

        Raises UserError if the user asked for several workers.
        """
        if self.workers not in (None, 1):
            raise UserError(
                f"--workers {self.workers}: with --device-map auto one process uses all GPUs. Leave one of the two out."
            )
        return HERE

    def executor(self, order: Order, device: torch.device) -> Executor | None:
        """Return the executor for a run on this device; None if this process executes all jobs itself."""
        gpus = _visible() if device.type == "cuda" and device.index is None else [None]
        count = len(gpus) if self.workers is None else self.workers
        if count == 1:
            return None
        return LocalExecutor(order, [gpus[number % len(gpus)] for number in range(count)])


HERE = Placement(workers=1)


def _visible() -> list[str | None]:
    """Return how CUDA_VISIBLE_DEVICES names each GPU that this process sees."""
    import torch

    named = [name for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    return list(named) or [str(number) for number in range(torch.cuda.device_count())]
