"""Where the jobs of a run are executed, as the user chose it. Imports no torch until a run begins."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvbench.errors import SetupError, UserError, counted
from kvbench.runner.workers.executor import Executor, Order
from kvbench.runner.workers.local import VISIBLE, LocalExecutor
from kvbench.runner.workers.slurm_parameters import Parameters

if TYPE_CHECKING:
    import torch

PACKAGES = {"local": None, "ray": "ray", "slurm": "submitit"}  # executor -> package; kvbench[EXECUTOR] installs it
NAMES = tuple(PACKAGES)
MOST = 4096  # workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the jobs of a run are executed.

    name: the executor, one of `NAMES`. workers: how many workers; None: the executor's default, such as one per GPU.
    address: the Ray cluster's address; None: RAY_ADDRESS, or a new Ray cluster on this machine. slurm: parameters of
    Slurm jobs.
    """

    name: str = "local"
    workers: int | None = None
    address: str | None = None
    slurm: Parameters = field(default_factory=dict)

    def require_package(self) -> None:
        """Raise SetupError if the executor's package is missing."""
        package = PACKAGES[self.name]
        if package and importlib.util.find_spec(package) is None:
            raise SetupError(f"--executor {self.name} needs {package}: pip install 'kvbench[{self.name}]'.")

    def alone(self) -> Placement:
        """Return the placement of a run whose model is divided among all GPUs: this process executes all jobs. Raises
        UserError if the user asked for several workers or for a cluster."""
        if self.name != "local" or self.workers not in (None, 1):
            option = f"--workers {self.workers}" if self.name == "local" else f"--executor {self.name}"
            raise UserError(
                f"{option}: with --device-map auto one process uses all GPUs. Leave out one of the two options."
            )
        return HERE

    def executor(self, order: Order, device: torch.device, on_cpus: int) -> Executor | None:
        """Return the executor for a run on this device; None if this process executes all jobs itself.

        on_cpus: how many local workers a run on CPUs has if the user gave no number. Raises KVBenchError if the cluster
        cannot be used, for a device with a number (cuda:1) in a cluster, or if local workers or a new Ray cluster need
        more GPUs than this machine has. An existing cluster is not checked for this.
        """
        if self.name == "local":
            return self._local(order, device, on_cpus)
        if device.index is not None:
            raise UserError(
                f"--executor {self.name} chooses a GPU for every worker; give --device {device.type} without a number."
            )
        gpus = device.type == "cuda"
        if self.name == "ray":
            from kvbench.runner.workers.ray_cluster import RayExecutor

            return RayExecutor(order, address=self.address, workers=self.workers, gpus=gpus)
        from kvbench.runner.workers.slurm import SlurmExecutor

        return SlurmExecutor(order, workers=self.workers or 1, parameters=self.slurm, gpus=gpus)

    def _local(self, order: Order, device: torch.device, on_cpus: int) -> Executor | None:
        gpus = _visible() if device.type == "cuda" and device.index is None else [None]
        default = on_cpus if device.type == "cpu" else len(gpus)
        count = default if self.workers is None else self.workers
        if count == 1:
            return None
        if device.type == "cuda" and count > len(gpus):
            raise UserError(f"--workers {count}: {counted(len(gpus), 'GPU')} can be used, and each worker needs a GPU.")
        return LocalExecutor(order, [gpus[number % len(gpus)] for number in range(count)])


HERE = Placement(workers=1)


def _visible() -> list[str | None]:
    """Return, for each GPU that this process sees, the name that selects it in CUDA_VISIBLE_DEVICES."""
    import torch

    named = [name for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    count = torch.cuda.device_count()  # CUDA ignores an unknown name and all names after it
    return list(named[:count]) or [str(number) for number in range(count)]
