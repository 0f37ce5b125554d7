"""A report on invented rows that have data for every figure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvbench.report.load import load
from kvbench.report.scores import ScoreReport

CELLS = (("full", None, 0.9), ("gkv", 48, 0.7), ("gkv", 96, 0.8), ("tova", 48, 0.5), ("tova", 96, 0.6))
SUBTASKS = ("niah_single_1", "niah_multikey_3", "vt")
DEPTHS = ("depth 000%", "depth 050%", "depth 100%")


def scores(strength: float, count: int = 12) -> list[float]:
    """As many scores, of which about `strength` are 1, and a few in between."""
    return [float(i / count < strength) if i % 4 else strength for i in range(count)]


def cell(rows: Callable, method: str, budget: int | None, strength: float, **changes: Any) -> list[dict[str, Any]]:
    """Rows whose bytes depend on the budget, and times and lengths on the question."""
    costs = {} if budget is None else {"kv_bytes_peak": 2048 * (budget + 32), "entries_after_evict": float(budget)}
    made = rows(method, budget, scores(strength), **(costs | changes))
    return [
        row | {"output_tokens": 80 + 5 * i, "stop_reason": "length" if i % 6 == 5 else "stop", "decode_seconds": 1 + i}
        for i, row in enumerate(made)
    ]


@pytest.fixture
def report(make_run: Callable, rows: Callable) -> ScoreReport:
    """walk and chain; RULER at two lengths; needles at three depths and two lengths."""
    parts = [cell(rows, *c, task=task) for task in ("walk", "chain") for c in CELLS]
    for length in (4096, 16384):
        for c in CELLS:
            parts += [cell(rows, *c, task=f"ruler/{name}@{length}", category=name) for name in SUBTASKS]
            needles = cell(rows, *c, task=f"niah@{length}")
            parts.append([row | {"category": DEPTHS[i % 3]} for i, row in enumerate(needles)])
    return ScoreReport.make(load([make_run("r1", *parts)]))
