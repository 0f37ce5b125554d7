"""Scores by category: of subjects, levels, difficulties, depths, lengths, as each task sorts its questions.

    report = CategoryReport.make(load([Path("results/demo")]))
    FORMATS["markdown"](report)

A category "5/Precalculus" has two parts, and each part gets a table of its own, where all categories of a task have the
same number of parts. A task that was run at several lengths gets one table for each method and budget, with the lengths
as columns: the map of a needle in a haystack.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from kvbench.errors import UserError
from kvbench.eviction.budget import Budget, label
from kvbench.report import stats
from kvbench.report.cells import cells_of, clusters_of
from kvbench.report.load import Group, Loaded
from kvbench.report.render import Block
from kvbench.report.rows import ranks
from kvbench.report.tables import headline_of, shared_options

NOTHING = "-"
ACROSS = 5  # columns of scores that fit 80 characters
LENGTH = re.compile(r"@(\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoryCell:
    """One method at one budget on the questions of one category. `length` of the prompts, where the task has one."""

    task: str  # without its length
    group: str
    part: int  # which part of the category, from 1
    parts: int
    category: str
    method: str
    budget: Budget | None
    length: int | None
    headline: str
    score: stats.Estimate

    @property
    def column(self) -> str:
        return self.method if self.budget is None else f"{self.method} {label(self.budget)}"


@dataclass(frozen=True, slots=True)
class CategoryTable:
    """Categories down, methods or lengths across. A line is a category with its cells by column."""

    title: str
    across: list[str]
    lines: list[tuple[str, dict[str, CategoryCell]]]


@dataclass(frozen=True, slots=True)
class CategoryReport:
    """Every cell's score in each category."""

    name: ClassVar[str] = "categories"
    about: ClassVar[str] = (
        "Scores with standard errors over the questions of a category; questions counts those of the first column."
    )
    loaded: Loaded
    cells: list[CategoryCell]
    tables: list[CategoryTable]

    @classmethod
    def make(cls, loaded: Loaded) -> CategoryReport:
        """Raises UserError where no task sorts its questions."""
        shared = shared_options(loaded)
        cells = [cell for group in loaded.groups for cell in _cells(group, shared)]
        tables = list(_tables(cells))
        if not tables:
            raise UserError("--by category: no task of these runs has more than one category.")
        shown = {id(cell) for table in tables for _, line in table.lines for cell in line.values()}
        return cls(loaded, [cell for cell in cells if id(cell) in shown], tables)

    def blocks(self, plus_minus: str) -> Iterator[Block]:
        for table in self.tables:
            yield Block(title=table.title, grids=[(view, table.lines) for view in columns(table, plus_minus)])

    def lines(self) -> list[dict[str, Any]]:
        return [flat(cell) for cell in self.cells]

    def data(self) -> dict[str, Any]:
        return {"cells": self.lines()}


def _cells(group: Group, shared: Mapping[str, Mapping[str, Any]]) -> Iterator[CategoryCell]:
    names = group.rows.text("category")
    rows = group.rows.where(names.codes >= 0)
    split = {names.names[code]: names.names[code].split("/") for code in names.present()}
    counts = {len(parts) for parts in split.values()}
    if len(counts) != 1:  # none, or "/" is part of a name
        split, counts = {name: [name] for name in split}, {1}
    (parts,) = counts
    found = LENGTH.search(group.task)
    clusters = clusters_of(rows)
    for part in range(parts):
        kept = {name: parts_of[part] for name, parts_of in split.items()}
        categories = rows.text("category").renamed(kept.get)
        order = sorted(categories.names)
        for (place,), own in rows.parts(ranks(categories.names)[categories.codes]):
            for method, budget, cell in cells_of(own, shared):
                yield CategoryCell(
                    task=LENGTH.sub("", group.task),
                    group=group.label,
                    part=part + 1,
                    parts=parts,
                    category=order[place],
                    method=method,
                    budget=budget,
                    length=int(found[1]) if found else None,
                    headline=headline_of(group.task),
                    score=_estimate(cell.scores(headline_of(group.task)), clusters),
                )


def _estimate(scores: Mapping[str, Sequence[float]], clusters: Mapping[str, str]) -> stats.Estimate:
    return stats.estimate(list(scores.values()), clusters=[clusters[question] for question in scores])


def _tables(cells: Sequence[CategoryCell]) -> Iterator[CategoryTable]:
    for same in _by(cells, lambda c: (c.task, c.group, c.part)):
        if len({cell.category for cell in same}) < 2:
            continue
        if len({cell.length for cell in same}) > 1:
            by_length = sorted(same, key=lambda c: c.length or 0)
            for one in _by(by_length, lambda c: c.column):
                yield _table(_title(one[0], one[0].column), one, lambda c: f"@{c.length}")
        else:
            yield _table(_title(same[0], f"@{same[0].length}" if same[0].length else ""), same, lambda c: c.column)


def _title(cell: CategoryCell, of: str) -> str:
    part = f", part {cell.part} of {cell.parts}" if cell.parts > 1 else ""
    return ", ".join(filter(None, (f"{cell.task} by category{part}", cell.group, of)))


def _table(title: str, cells: Sequence[CategoryCell], column: Callable[[CategoryCell], str]) -> CategoryTable:
    across = list(dict.fromkeys(column(cell) for cell in cells))
    lines = [(one[0].category, {column(c): c for c in one}) for one in _by(cells, lambda c: c.category)]
    return CategoryTable(title, across, sorted(lines, key=lambda line: line[0]))


def _by(cells: Sequence[CategoryCell], key: Callable[[CategoryCell], Any]) -> list[list[CategoryCell]]:
    """Cells of one key together, in order of first appearance."""
    groups: dict[Any, list[CategoryCell]] = {}
    for cell in cells:
        groups.setdefault(key(cell), []).append(cell)
    return list(groups.values())


Line = tuple[str, dict[str, CategoryCell]]


def columns(table: CategoryTable, plus_minus: str) -> Iterator[list[tuple[str, Callable[[Line], str]]]]:
    """What people see, in as many grids as the columns need."""

    def score(line: Line, name: str) -> str:
        if name not in line[1] or math.isnan(line[1][name].score.mean):
            return NOTHING
        found = line[1][name].score
        return f"{found.mean:.3f}" + ("" if math.isnan(found.se) else f" {plus_minus}{found.se:.2f}")

    def questions(line: Line, name: str) -> str:
        return str(line[1][name].score.questions) if name in line[1] else NOTHING

    for start in range(0, len(table.across), ACROSS):
        names = table.across[start : start + ACROSS]
        yield [
            ("category", lambda line: line[0]),
            ("questions", partial(questions, name=names[0])),
            *((name, partial(score, name=name)) for name in names),
        ]


def flat(cell: CategoryCell) -> dict[str, Any]:
    """A cell as plain data; None where there is no number."""
    data: dict[str, Any] = {
        "group": cell.group,
        "task": cell.task,
        "length": cell.length,
        "part": cell.part,
        "category": cell.category,
        "method": cell.method,
        "budget": None if isinstance(cell.budget, float) else cell.budget,
        "budget_share": cell.budget if isinstance(cell.budget, float) else None,
        "headline": cell.headline,
        "mean": cell.score.mean,
        "se": cell.score.se,
        "low": cell.score.low,
        "high": cell.score.high,
        "questions": cell.score.questions,
        "samples": cell.score.samples,
    }
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in data.items()}
