"""The report of ``--published``: for each cell, the scores that papers print beside the cell's own score, with the
difference.

Papers print no error bars. If both scores are over the same questions, only the random draw of answers differs. The
standard errors of both scores are therefore estimated from how much the cell's samples of one question differ. The
error of the cell's score is computed with the cell's number of samples per question, and the error of the paper's score
with the paper's number. If the paper states no number, the cell's number takes its place. If the task is known to have
more questions than the run asked, the error of the cell's score is the standard error over questions instead, and the
error of the paper's score is computed for all questions of the task. If the paper is known to have asked only a part of
the benchmark, its error is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from kvbench.errors import KVBenchError, few
from kvbench.report import published
from kvbench.report.blocks import Block, Column, Report, chosen, identity, with_error
from kvbench.report.cells import ScoreCell
from kvbench.report.load import Group, Loaded
from kvbench.report.published import Printed
from kvbench.report.tables import TaskTable, make_tables
from kvbench.taskkit.names import get_task

Z = 1.96
MOST = 6  # a note lists up to this many printed scores without a cell


@dataclass(frozen=True, slots=True)
class Beside:
    """A printed score and the cell beside which it is shown. error: the standard error of the cell's score.
    printed_error: the standard error of the printed score. Each is NaN if unknown."""

    cell: ScoreCell
    printed: Printed
    interval: int | None
    error: float
    printed_error: float

    @property
    def difference(self) -> float:
        return self.cell.score.mean - self.printed.value

    @property
    def within(self) -> bool | None:
        """Whether the difference of the two scores is at most its 95% error bar, computed from both standard errors as
        if the scores were independent; None if an error is unknown."""
        both = math.hypot(self.error, self.printed_error)
        return None if math.isnan(both) else abs(self.difference) <= Z * both


COLUMNS = [
    *identity(lambda line: line.cell),
    Column("interval", "interval"),
    Column("score", "cell.score.mean"),
    Column("error", "error"),
    Column("", lambda line: with_error(line.cell.score.mean, line.error), "here"),
    Column("published", "printed.value"),
    Column("published_error", "printed_error"),
    Column("", lambda line: with_error(line.printed.value, line.printed_error), "published"),
    Column("difference", "difference", "difference", "{:+.3f}".format),
    Column("within", "within"),
    Column("", lambda line: {True: "yes", False: "no"}.get(line.within), "within both", left=True),
    Column("published_method", "printed.row.method", "as the paper names it", left=True),
    Column("metric", "printed.row.metric"),
    Column("source", "printed.source"),
    Column("", "printed.row.table_or_figure", "in", left=True),
    Column("notes", "printed.notes"),
]
SHOWN = ("method", "budget", "here", "published", "difference", "within both", "as the paper names it", "in")


@dataclass(frozen=True, slots=True)
class PublishedTable:
    """The printed scores of one task beside the scores of the cells. lacking: the printed scores of the same model and
    task that belong to no cell with a score."""

    table: TaskTable
    lines: list[Beside]
    lacking: list[Printed]

    def block(self) -> Block:
        where = f"evicting every {self.table.interval} tokens" if self.table.interval else ""
        papers = dict.fromkeys(line.printed.row.paper for line in self.lines)
        notes = [f"From {', '.join(papers)}."]
        parts = {line.printed.source: line.printed.part for line in self.lines if line.printed.part is not None}
        notes += [
            f"{source}: only {part} of the benchmark's questions were asked. Scores on other questions may differ by "
            'more than the draw of answers, so "within both" is empty.'
            for source, part in parts.items()
        ]
        if self.lacking:
            cells = list(dict.fromkeys(f"{printed.row.method} at {printed.budget}" for printed in self.lacking))
            notes.append(f"Published, but with no cell here: {few(cells, MOST)}.")
        return Block(
            title=", ".join(filter(None, (self.table.task, self.table.group, where))),
            lines=self.lines,
            grids=[chosen(COLUMNS, SHOWN)],
            columns=[Column("group", lambda _: self.table.group), Column("task", lambda _: self.table.task), *COLUMNS],
            notes=notes,
            facts={"group": self.table.group, "task": self.table.task},
        )


@dataclass(frozen=True, slots=True)
class PublishedReport(Report):
    """A report of the cells that have a score and to which a printed score belongs, as in `published.of_cell`."""

    name: ClassVar[str] = "published"
    about: ClassVar[str] = (
        "Published scores come with kvbench; the papers used their own code, prompts and budgets. They "
        "print no error bars: both errors are the error of drawing answers to the same questions again, estimated from "
        "the samples here, with the paper's number of samples where it is stated. Within both: the difference is at "
        "most 1.96 times their joint standard error; empty (-) if an error is not known, because a question has one "
        "sample here, all samples agree, or the paper asked only a part of the benchmark's questions. "
        "One cell may stand beside several published scores, because rows do not say which recipe trained the weights."
    )
    tables: list[PublishedTable]

    @classmethod
    def make(cls, loaded: Loaded) -> PublishedReport:
        tables = make_tables(loaded)
        found = (_beside(group, table) for group, table in zip(loaded.groups, tables))
        return cls(loaded, [table for table in found if table.lines])

    def head(self) -> list[str]:
        if self.tables:
            return []
        models = dict.fromkeys(model for group in self.loaded.groups for model in group.rows.values("model"))
        return [published.no_match(models)]

    def blocks(self) -> Iterator[Block]:
        return (table.block() for table in self.tables)


def _beside(group: Group, table: TaskTable) -> PublishedTable:
    models, lengths = group.rows.values("model"), group.rows.values("max_new_tokens")
    size = _size(table.task)
    lines = []
    for cell in table.cells:
        if not math.isnan(cell.score.mean):
            own = _error(cell, size)
            for printed in published.of_cell(table.task, cell, models, lengths):
                interval = table.interval if cell.evicts else None
                lines.append(Beside(cell, printed, interval, own, _printed_error(cell, printed, size)))
    shown = {id(line.printed) for line in lines}
    every = [printed for model in models[:1] for printed in published.of_task(table.task, model)]
    return PublishedTable(table, lines, [printed for printed in every if id(printed) not in shown])


def _size(task: str) -> float | None:
    """Return the number of questions of a task: infinity if the task can make any number of questions; None if the
    number is unknown."""
    try:
        known = get_task(task)
    except KVBenchError:
        return None
    return math.inf if known.endless else known.size()


def _error(cell: ScoreCell, size: float | None) -> float:
    whole = size is None or cell.score.questions >= size
    return _positive(cell.score.se_fixed if whole else cell.score.se)


def _printed_error(cell: ScoreCell, printed: Printed, size: float | None) -> float:
    """Return the standard error of a printed score, NaN if unknown. A mean over n questions with k samples each has an
    error of 1 / sqrt(n k) times the spread of samples, which is taken from the cell."""
    if printed.part is not None:
        return math.nan
    asked = cell.score.questions
    each = cell.samples / asked
    theirs = (asked if size is None or math.isinf(size) else size) * (printed.samples or each)
    return _positive(cell.score.se_fixed) * math.sqrt(cell.samples / theirs)


def _positive(error: float) -> float:
    """Return `error`, or NaN in place of 0: a standard error of 0 only says that the samples have no spread."""
    return error if error > 0 else math.nan
