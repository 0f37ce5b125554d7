"""Reads the scores of every cell question by question, for each table of the report.

    for scored in read(report):
        scored.cells["gkv", "48"]["q17"]      # the samples' scores of the task's headline column

The tables of a report hold means. Paired differences, panels by length and the choice of questions to show need the
score of each question.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvbench.eviction.budget import named
from kvbench.report.cells import FULL, cells_of, clusters_of
from kvbench.report.rows import Rows
from kvbench.report.scores import ScoreReport
from kvbench.report.tables import TaskTable, shared_options

Cell = tuple[str, str]  # (method with its options, budget as text)


@dataclass(frozen=True, slots=True)
class Scored:
    """A table of the report, with the rows and scores of its cells. The full cache comes first, then the other cells in
    the table's order.

    `parts`: the rows of each cell. `cells`: for each cell the samples' scores by question. `shown`: for each cell, by
    question, the score of the question's first sample with the status ok; the page shows the answer of this sample.
    `clusters`: the cluster of each question, for standard errors.
    """

    table: TaskTable
    parts: dict[Cell, Rows]
    cells: dict[Cell, dict[str, list[float]]]
    shown: dict[Cell, dict[str, float]]
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
        ordered = sorted(cells_of(group.rows, shared), key=lambda cell: cell[0] != FULL)
        parts = {(method, named(budget)): rows for method, budget, rows in ordered}
        scores = {cell: rows.scores(table.headline) for cell, rows in parts.items()}
        first = {cell: _first(rows, table.headline) for cell, rows in parts.items()}
        yield Scored(table, parts, scores, first, clusters_of(group.rows))


def _first(rows: Rows, headline: str) -> dict[str, float]:
    """Return the score of each question's first sample with the status ok."""
    ok = rows.where(rows.text("status").is_one_of("ok"))
    in_turn = ok.where(ok.number("sample").argsort(kind="stable"))
    return {question: samples[0] for question, samples in in_turn.scores(headline).items()}


def title(table: TaskTable) -> str:
    """Return a table's title on the page: its task, and how it differs from the task's other tables."""
    return ", ".join(filter(None, (table.task, table.group)))
