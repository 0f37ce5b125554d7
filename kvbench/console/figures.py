"""The figures of a run under way that its progress display shows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """How far one process is with the rows of a run.

    cell: label of the cell at work. saved: rows on the disk. tokens: generated tokens. kv_now, kv_peak: bytes of the KV
    cache now, and at most in this cell. mean: mean headline score of the cell's rows; half: half the width of its 95%
    confidence interval.
    """

    cell: str = ""
    saved: int = 0
    tokens: int = 0
    kv_now: int = 0
    kv_peak: int = 0
    mean: float | None = None
    half: float | None = None
