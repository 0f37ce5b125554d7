"""The figures that a run's progress display shows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The progress of one process that generates rows of a run.

    cell: label of the cell that it generates now. saved: rows that it has saved on the disk. tokens: tokens that it has
    generated. kv_now, kv_peak: bytes of the KV cache now, and at most in this cell. mean: mean headline score of the
    cell's rows. half: half the width of the 95% confidence interval of `mean`.
    """

    cell: str = ""
    saved: int = 0
    tokens: int = 0
    kv_now: int = 0
    kv_peak: int = 0
    mean: float | None = None
    half: float | None = None
