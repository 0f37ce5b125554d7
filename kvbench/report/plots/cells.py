"""The cells of a report as data of figures: plain values, with equal fields in every figure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from kvbench.eviction.budget import label
from kvbench.report.cells import ScoreCell
from kvbench.report.tables import TaskTable

Point = dict[str, Any]


def points(table: TaskTable) -> list[Point]:
    """A table's cells; figures that the rows lack are None."""
    return [_point(table, cell) for cell in table.cells]


def panel(table: TaskTable) -> str:
    """A panel's title, with the number of questions of its cells."""
    counts = sorted({cell.score.questions for cell in table.cells})
    n = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return ", ".join(filter(None, (table.task, table.group, f"n = {n}")))


def shown_name(cell: ScoreCell) -> str:
    """A cell's method, marked as tables mark it."""
    return cell.method + " *" * cell.marked


def budget(cell: ScoreCell) -> str:
    """The budget as the user types it; empty without one."""
    return "" if cell.budget is None else label(cell.budget)


def names(tables: Iterable[TaskTable]) -> list[str]:
    """All methods of a report, sorted: the order that decides on colours."""
    return sorted({shown_name(cell) for table in tables for cell in table.cells})


def present(points: Sequence[Point], key: str = "method") -> list[Any]:
    """The distinct values of a field, in order of first appearance."""
    return list(dict.fromkeys(point[key] for point in points))


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _point(table: TaskTable, cell: ScoreCell) -> Point:
    shared = isinstance(cell.budget, float)
    return {
        "panel": panel(table),
        "task": table.task,
        "group": table.group,
        "method": shown_name(cell),
        "budget": budget(cell),
        "entries": None if shared else cell.budget,
        "share": cell.budget if shared else None,
        "score": finite(cell.score.mean),
        "low": finite(cell.score.low),
        "high": finite(cell.score.high),
        "questions": cell.score.questions,
        "bytes": finite(cell.kv_bytes_peak),
        "progress": cell.progress,
    }
