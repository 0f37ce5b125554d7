"""Measures and limits a device's memory, and frees it before a retry. `OutOfMemory`: the error when it runs out."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import torch

from kvbench.console import faults
from kvbench.errors import SetupError

if TYPE_CHECKING:
    from kvbench.engine.sequence import Sequence


class OutOfMemory(SetupError):
    """The engine ran out of memory.

    Attributes:
        under_way: (question id, sample) of each sequence that was being read or decoded; empty if the engine was not
            built yet.
        cause: first line of the allocator's message.
    """

    def __init__(self, error: BaseException, under_way: Iterable[Sequence] = ()) -> None:
        self.cause = faults.first_line(error)
        self.under_way = tuple((sequence.request.doc_id, sequence.sample) for sequence in under_way)
        super().__init__(f"out of memory ({self.cause}). Use fewer --slots, or a smaller --budget.")


def total(device: torch.device) -> int:
    """Return the bytes of the device's memory. For a CPU, this is the machine's memory or, if that is smaller, the
    limit of the process's control groups, which containers and Slurm set."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return _host()


@functools.cache
def _host() -> int:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [machine]
    for file in _limit_files():
        with contextlib.suppress(OSError, ValueError):  # ValueError: "max"
            limits.append(int(file.read_text()))
    return min(limits)


def _limit_files() -> Iterator[Path]:
    """Yield the files with the memory limits of this process's control group and of all groups above it. A group above
    may have a lower limit. A file may be missing: a container sees its own group as the root of the tree."""
    lines = []
    with contextlib.suppress(OSError, ValueError):  # ValueError: a name that is no UTF-8
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = {controllers: group for _, controllers, group in (line.split(":", 2) for line in lines)}
    unified = own.get("", "/")
    memory = next((group for controllers, group in own.items() if "memory" in controllers.split(",")), "/")
    for root, group, name in (
        (Path("/sys/fs/cgroup"), unified, "memory.max"),
        (Path("/sys/fs/cgroup/memory"), memory, "memory.limit_in_bytes"),
    ):
        inside = PurePosixPath(group.lstrip("/"))
        if ".." in inside.parts:  # a group outside the tree that this process sees
            inside = PurePosixPath()
        for part in (inside, *inside.parents):
            yield root / part / name


def release(device: torch.device) -> None:
    """Collect Python's garbage, and give the memory that torch caches back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def limit(device: torch.device, most: int | None) -> None:
    """Let torch allocate at most `most` bytes of a GPU's memory. Set no limit if the device is a CPU, if `most` is
    None, or if the GPU has no more than `most` bytes."""
    if device.type == "cuda" and most is not None and most < total(device):
        torch.cuda.set_per_process_memory_fraction(most / total(device), device)


def reset_peak(*devices: torch.device) -> None:
    """Begin to measure the peak memory use of these devices, which `peak` returns."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)


def peak(*devices: torch.device) -> int | None:
    """Return the most bytes that tensors, weights included, took since `reset_peak` on the fullest of these GPUs.
    Returns None if there is no GPU among the devices."""
    return max(
        (int(torch.cuda.max_memory_allocated(device)) for device in devices if device.type == "cuda"), default=None
    )
