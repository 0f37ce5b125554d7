"""Finds scores that papers print for the same model, task, method and budget as a cell.

    found = read(tables)
    found.lines, found.reason

The page shows these scores beside a cell's score and draws no conclusion.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvbench.eviction.budget import named
from kvbench.report import published
from kvbench.report.blocks import estimated
from kvbench.report.page.scored import Scored


@dataclass(frozen=True, slots=True)
class Line:
    """A published score beside the score of the cell with the same model, task, method and budget."""

    task: str
    method: str
    budget: str
    own: str
    published: str
    source: str
    notes: str


@dataclass(frozen=True, slots=True)
class Published:
    """The published scores that match a cell of the report. `reason`: why no score matches; empty if one matches."""

    lines: list[Line]
    reason: str


def read(tables: list[Scored]) -> Published:
    lines = [line for scored in tables for line in _matches(scored)]
    models = sorted({model for scored in tables for model in _values(scored, "model")})
    return Published(lines, "" if lines else published.no_match(models))


def _matches(scored: Scored) -> Iterator[Line]:
    models, lengths = _values(scored, "model"), _values(scored, "max_new_tokens")
    for cell in scored.table.cells:
        if math.isnan(cell.score.mean):
            continue
        for printed in published.of_cell(scored.table.task, cell, models, lengths):
            row = printed.row
            value = f"{printed.value * 100:g} {row.unit}, {row.metric} ({row.method})"
            own = estimated(cell.score)
            yield Line(scored.title, cell.method, named(cell.budget), own, value, printed.source, printed.notes)


def _values(scored: Scored, column: str) -> set[Any]:
    return {value for rows in scored.parts.values() for value in rows.values(column)}
