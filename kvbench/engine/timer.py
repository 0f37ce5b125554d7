"""Measures the seconds that a device spends on some work, without making the host wait during the work."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch


class Timer:
    """Adds up the time of the work inside all `with timer.running():` blocks.

    On a GPU, events on the current stream mark the start and end of each block; the host waits only in `seconds`.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0  # blocks on a CPU
        self._marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Add the time of the work inside the `with` block."""
        if self._on_gpu:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._marks.append((begin, end))
        else:
            began = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - began

    def seconds(self) -> float:
        """Return the seconds of all blocks so far; on a GPU, wait until the device has finished the last block."""
        if self._marks:
            self._marks[-1][1].synchronize()
        return self._seconds + sum(begin.elapsed_time(end) for begin, end in self._marks) / 1000
