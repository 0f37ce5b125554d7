"""Turns the cells of a report into the data points of its figures: plain values. A value that is also in the report's
CSV and JSON has the same name there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.eviction.budget import label
from kvbench.report.blocks import starred
from kvbench.report.cells import ScoreCell, answered, cells_of, mean, present
from kvbench.report.overview import frontier
from kvbench.report.plots.figure import Point
from kvbench.report.rows import Rows
from kvbench.report.scores import ScoreReport
from kvbench.report.tables import TaskTable, shared_options

IDENTITY = ("panel", "task", "group", "method", "dash", "cell", "budget", "budget_share", "questions", "progress")
QUARTILES = (0.25, 0.75)


def points(report: ScoreReport) -> list[Point]:
    """Return a point for every cell, in the order of the tables. Numbers that the rows lack are None."""
    shared = shared_options(report.loaded)
    return [
        _point(table, cell, rows, edge)
        for group, table in zip(report.loaded.groups, report.tables, strict=True)
        for edge in [frontier(table)]
        for cell, (_, _, rows) in zip(table.cells, cells_of(group.rows, shared), strict=True)
    ]


def only(points: Sequence[Point], *fields: str) -> list[Point]:
    """Return the points with only the fields in `fields` and in IDENTITY. A field is left out of a point in which its
    value is None."""
    return [{f: p[f] for f in (*IDENTITY, *fields) if p.get(f) is not None} for p in points]


def _point(table: TaskTable, cell: ScoreCell, rows: Rows, edge: Sequence[ScoreCell]) -> Point:
    answers = answered(rows)
    tokens = answers.number("output_tokens")
    figures = {
        "mean": cell.score.mean,
        "low": cell.score.low,
        "high": cell.score.high,
        "kv_bytes_peak": cell.kv_bytes_peak,
        "tokens_per_second": cell.tokens_per_second,
        "slower": cell.tokens_per_second - cell.tokens_per_second_sd,
        "faster": cell.tokens_per_second + cell.tokens_per_second_sd,
        "output_tokens": mean(tokens),
        **_spread(tokens),
        "truncated": cell.truncated,
    }
    shared = isinstance(cell.budget, float)
    method = starred(cell)
    return {
        "panel": _panel(table),
        "frontier": any(cell is one for one in edge),
        "task": table.task,
        "model": " and ".join(sorted(rows.values("model"))),
        "group": table.group,
        "method": method,
        "cell": method if cell.budget is None else f"{method} {label(cell.budget)}",
        "budget": None if shared else cell.budget,
        "budget_share": cell.budget if shared else None,
        "questions": cell.score.questions,
        "answers": len(answers),
        "progress": cell.progress,
        **{name: value if math.isfinite(value) else None for name, value in figures.items()},
    }


def _panel(table: TaskTable) -> str:
    """Return a panel's title: its task and group, and the number of questions of its cells."""
    counts = sorted({cell.score.questions for cell in table.cells})
    n = f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}"
    return ", ".join(filter(None, (table.task, table.group, n)))


def _spread(tokens: Any) -> Mapping[str, float]:
    """Return the quartiles of the answers' numbers of tokens as two fields. tokens: one number per answer."""
    import numpy as np

    kept = present(tokens)
    low, high = np.quantile(kept, QUARTILES).tolist() if len(kept) else (math.nan, math.nan)
    return {"output_tokens_q1": low, "output_tokens_q3": high}
