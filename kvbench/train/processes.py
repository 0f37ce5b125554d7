"""The processes that share a training: a single one, or those that torchrun or `accelerate launch` started.

Both launchers pass each process its rank and the number of processes in environment variables. Processes exchange
tensors by torch.distributed (gloo between CPUs, NCCL between GPUs). Every process loads the model, generates answers to
its share of the questions and stores them, and computes the held-out figures. All other files are written by the first
process only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed

from kvbench.console.faults import words
from kvbench.errors import SetupError, UserError

# How long a process waits for the others, which may still generate answers. If a process dies, the launcher ends the
# others earlier.
PATIENCE = timedelta(hours=12)


@dataclass(frozen=True, slots=True)
class Processes:
    """How many processes share a training (`count`), and which of them this process is (`rank`, from 0)."""

    count: int = 1
    rank: int = 0

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, batch: int) -> slice:
        """Return the slice of a batch that this process computes. Raises UserError when the batch cannot be divided
        equally."""
        if batch % self.count:
            raise UserError(
                f"a batch of {batch} cannot be shared equally by {self.count} processes; choose a "
                f"--batch that is a multiple of {self.count}."
            )
        size = batch // self.count
        return slice(self.rank * size, (self.rank + 1) * size)

    def part(self, size: int, rank: int | None = None) -> slice:
        """Divide `size` numbers among the processes; return the slice of the process `rank` (None: this process). The
        slices follow each other in the order of the ranks; their lengths differ by at most 1."""
        rank = self.rank if rank is None else rank
        return slice(rank * size // self.count, (rank + 1) * size // self.count)

    def share_parts(self, row: torch.Tensor) -> None:
        """Complete the 1-D tensor `row` in all processes: copy each process's `part` of it to the others."""
        for rank in range(self.count) if self.count > 1 else ():
            if len(part := row[self.part(len(row), rank)]):
                distributed.broadcast(part, src=rank)

    def gather(self, own: torch.Tensor, size: int) -> torch.Tensor:
        """Collect a row of `size` numbers in the first process; every process sends its `part` of the row. own: the
        part of this process. Returns the whole row in the first process, and `own` in the others."""
        if self.count == 1:
            return own
        if not self.first:
            if len(own):
                distributed.send(own, dst=0)
            return own
        row = own.new_empty(size)
        row[self.part(size)] = own
        for rank in range(1, self.count):
            if len(part := row[self.part(size, rank)]):
                distributed.recv(part, src=rank)
        return row

    def average(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its mean over all processes, which then hold exactly the same numbers."""
        if self.count > 1:
            distributed.all_reduce(tensor)
            tensor /= self.count

    def first_says(self, yes: bool) -> bool:
        """Return the value of `yes` that the first process passed."""
        told = torch.tensor(yes)
        self.copy_first([told])
        return bool(told)

    def wait(self) -> None:
        """Wait until all processes have reached this call."""
        self.average(torch.zeros(1))

    def copy_first(self, tensors: Iterable[torch.Tensor]) -> None:
        """Overwrite each tensor with the values that it has in the first process."""
        if self.count > 1:
            with torch.no_grad():
                for tensor in tensors:
                    distributed.broadcast(tensor, src=0)


def only_one() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) == 1


def is_first() -> bool:
    """Return whether this is the first process, which alone prints."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def joined() -> Iterator[Processes]:
    """Inside the `with` statement, connect this process with the other processes of the training.

    A nested `joined` uses the connection of the outer one. Raises SetupError when the processes cannot find each other,
    for example because their address is missing.
    """
    if only_one():
        yield Processes()
        return
    if distributed.is_initialized():
        yield Processes(distributed.get_world_size(), distributed.get_rank())
        return
    try:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        distributed.init_process_group(backend, timeout=PATIENCE)
    except (ValueError, RuntimeError) as error:
        reason = words(error).splitlines()[0]
        raise SetupError(f"the processes cannot find each other: {reason}. Start them with torchrun.") from error
    try:
        yield Processes(distributed.get_world_size(), distributed.get_rank())
    finally:
        distributed.destroy_process_group()


def own_device(name: str) -> str:
    """Return the device of this process: ``cuda:N`` with its local rank N, so that each process has its own GPU. If
    there is only one process or no GPU, or if `name` is neither "auto" nor "cuda", return `name`."""
    if only_one() or name not in ("auto", "cuda") or not torch.cuda.is_available():
        return name
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local < torch.cuda.device_count():  # else loading the model reports that there are too few GPUs
        torch.cuda.set_device(local)
    return f"cuda:{local}"
