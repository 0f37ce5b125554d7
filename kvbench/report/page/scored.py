"""The scores of every cell question by question, for each table of the report.

    for scored in read(report):
        scored.cells["gkv", "48"]["q17"]      # the samples' scores of the task's headline column

The tables of a report hold means; pairs, lengths and the choice of questions need the questions themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvbench.eviction.budget import named
from kvbench.report.cells import cells_of, clusters_of
from kvbench.report.rows import Rows
from kvbench.report.scores import ScoreReport
from kvbench.report.tables import TaskTable, shared_options

Cell = tuple[str, str]  # method with its options, budget as `named` writes it


@dataclass(frozen=True, slots=True)
class Scored:
    """A table of the report, with the rows and the scores of each of its cells. `clusters`: the source of each
    question, for standard errors."""

    table: TaskTable
    parts: dict[Cell, Rows]
    cells: dict[Cell, dict[str, list[float]]]
    clusters: dict[str, str]

    @property
    def title(self) -> str:
        return title(self.table)

    @property
    def budgets(self) -> list[str]:
        return list(dict.fromkeys(budget for _, budget in self.cells if budget != named(None)))


def read(report: ScoreReport) -> Iterator[Scored]:
    """Yield the report's tables with their rows and scores, in the report's order."""
    shared = shared_options(report.loaded)
    for group, table in zip(report.loaded.groups, report.tables, strict=True):
        parts = {(method, named(budget)): rows for method, budget, rows in cells_of(group.rows, shared)}
        scores = {cell: rows.scores(table.headline) for cell, rows in parts.items()}
        yield Scored(table, parts, scores, clusters_of(group.rows))


def title(table: TaskTable) -> str:
    """Return what the page calls a table: its task, and how it differs from the task's other tables."""
    return ", ".join(filter(None, (table.task, table.group)))
