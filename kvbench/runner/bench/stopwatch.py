"""Times one generation: in CPU time on a CPU, in wall time on a GPU."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass

import torch

from kvbench.engine import memory
from kvbench.records import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One timed generation of `tokens` tokens in each of `sequences` sequences.

    Attributes:
        seconds: time to read the prompts and to generate, measured by `clock`; wall: the same in wall time.
        first, first_wall: seconds until every sequence had its first token, by `clock` and in wall time; None where
            this is not known.
        usages: the engine's record of each sequence; empty for a baseline, which is another system than the engine.
        peak_bytes: most bytes allocated on the GPU; None on a CPU and for vLLM.
        costs: seconds per generated token in each whole stretch of the answers (`Setting.stretch` successive tokens),
            measured by `clock`.
    """

    sequences: int
    tokens: int
    seconds: float
    wall: float
    first: float | None = None
    first_wall: float | None = None
    usages: tuple[Usage, ...] = ()
    peak_bytes: int | None = None
    costs: tuple[float, ...] = ()

    @property
    def rate(self) -> float:
        """Generated tokens per second; the time includes reading the prompts."""
        return self.sequences * self.tokens / self.seconds

    @property
    def decode_rate(self) -> float | None:
        """Generated tokens per second from the moment when every sequence has its first token; None where unknown."""
        return None if self.first is None else self._after(self.seconds - self.first)

    @property
    def decode_wall_rate(self) -> float | None:
        """Like `decode_rate`, but in wall time."""
        return None if self.first_wall is None else self._after(self.wall - self.first_wall)

    def _after(self, seconds: float) -> float:
        return self.sequences * (self.tokens - 1) / max(seconds, 1e-9)


class Stopwatch:
    """Times one generation and its parts: the time until the first token, and stretches of `stretch` tokens.

    A system calls `lap` after its steps. If each sequence already has k tokens at the first call, the time of the first
    token is estimated: it is the time of this call minus k - 1 times the mean duration of the later steps.
    """

    def __init__(self, device: torch.device, stretch: int | None = None) -> None:
        self.device, self.stretch = device, stretch
        self.began = self._now()
        self._lap: tuple[tuple[float, float], int] | None = None
        self._marks: list[tuple[float, int]] = []  # time and tokens per sequence where a stretch begins or ends
        self._next: float = 0 if stretch else math.inf

    def _now(self) -> tuple[float, float]:
        return clock(self.device), time.perf_counter()

    def lap(self, tokens: int) -> None:
        """Record that every sequence has `tokens` tokens now. Reads the clock at the first call, and when a stretch
        (`stretch` successive tokens) is complete."""
        if self._lap is None:
            self._lap = self._now(), tokens
        if self.stretch and tokens >= self._next:
            self._marks.append((clock(self.device), tokens))
            self._next = (tokens // self.stretch + 1) * self.stretch

    def stop(self, sequences: int, tokens: int, usages: tuple[Usage, ...] = ()) -> Timing:
        """Return the measurement of a generation that has ended."""
        spent = [now - began for now, began in zip(self._now(), self.began)]
        firsts: list[float | None] = [None, None]
        if self._lap is not None and self._lap[1] < tokens:
            at, done = [now - began for now, began in zip(self._lap[0], self.began)], self._lap[1]
            firsts = [max(0.0, a - (done - 1) * (s - a) / (tokens - done)) for a, s in zip(at, spent)]
        return Timing(
            sequences=sequences,
            tokens=tokens,
            seconds=spent[0],
            wall=spent[1],
            first=firsts[0],
            first_wall=firsts[1],
            usages=usages,
            peak_bytes=memory.peak(self.device),
            costs=tuple((b - a) / (n - m) / sequences for (a, m), (b, n) in itertools.pairwise(self._marks)),
        )


def clock(device: torch.device) -> float:
    """Return the process's CPU seconds on a CPU; on a GPU wait for its work, then return wall seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()
