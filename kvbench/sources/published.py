"""Reads kvbench/bundled/published/published.csv: the numbers that papers print."""

from __future__ import annotations

import csv
import functools
import re
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).parents[1] / "bundled" / "published" / "published.csv"
_ENTRIES = re.compile(r"(\d+)(K?)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A number as a paper prints it. notes: further facts on its source, the hardware, and what the paper does not
    state. questions: how many questions the paper asked, if it is known to have asked only a part of the benchmark;
    otherwise empty."""

    paper: str
    table_or_figure: str
    model: str
    method: str
    task: str
    budget: str
    metric: str
    value: str
    unit: str
    notes: str
    questions: str = ""

    @property
    def entries(self) -> int | None:
        """The budget in entries, with ``1K`` as 1,024; None if the paper prints no number of entries, as
        for the full cache."""
        found = _ENTRIES.match(self.budget)
        return None if found is None else int(found[1]) * (1024 if found[2] else 1)


@functools.cache
def published() -> tuple[Published, ...]:
    """Return all published numbers, in the order of the file."""
    with open(FILE, encoding="utf-8", newline="") as file:
        return tuple(Published(**row) for row in csv.DictReader(file))
