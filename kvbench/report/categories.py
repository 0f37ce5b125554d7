"""Scores by category: by subject, level, difficulty, depth or length, as each task sorts its questions.

    report = CategoryReport.make(load([Path("results/demo")]))
    FORMATS["markdown"](report)

A category such as "5/Precalculus" has two parts, "5" and "Precalculus". If all categories of a task have the same
number of parts, each part has a table: one for the first parts, one for the second, and so on. Otherwise one table has
the whole categories. For a task that was run at several lengths, each of these tables is split into one table for each
method and budget, with the lengths as columns. For a needle in a haystack this is the usual map of depths and lengths.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from kvbench.errors import UserError
from kvbench.eviction.budget import Budget, label, named
from kvbench.report import stats
from kvbench.report.blocks import NAMED, Block, Column, Report, estimated, own, plain, starred
from kvbench.report.cells import UNBOUNDED, cells_of, clusters_of, decode_bounded, estimate, evicts
from kvbench.report.load import Group, Loaded
from kvbench.report.rows import ranks
from kvbench.report.tables import shared_options

ACROSS = 4  # columns of scores that fit 80 characters
LENGTH = re.compile(r"@(\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoryCell:
    """The score of one method at one budget on the questions of one category. `length`: the length of the prompts in
    tokens; None if the task has no lengths. `parts`: the number of parts into which "/" splits each category of the
    task. `category` holds one of these parts, and `part` is its number."""

    task: str  # without its length
    group: str
    part: int  # from 1
    parts: int
    category: str
    method: str
    budget: Budget | None
    marked: bool  # generated entries are not bounded by the budget
    length: int | None
    headline: str
    score: stats.Estimate

    @property
    def column(self) -> str:
        return starred(self) if self.budget is None else f"{starred(self)} {label(self.budget)}"


COLUMNS = [
    *own("group", "task", "length", "part", "category"),
    *NAMED,
    *own("headline"),
    *(Column(name, f"score.{name}") for name in ("mean", "se", "low", "high", "questions", "samples")),
]
Line = tuple[str, dict[str, CategoryCell]]  # a category, and its cells by column


def _shown(names: Sequence[str]) -> Iterator[Column]:
    """Yield the columns of a table: first the number of questions that the first column of scores counts, then all
    columns of scores. names: the titles of the columns of scores."""
    yield Column("", lambda line: line[1][names[0]].score.questions if names[0] in line[1] else None, "questions")
    for name in names:
        yield Column("", partial(_score, name), name)


def _score(name: str, line: Line) -> str | None:
    cell = line[1].get(name)
    if cell is None or math.isnan(cell.score.mean):
        return None
    return estimated(cell.score, digits=2)


@dataclass(frozen=True, slots=True)
class CategoryReport(Report):
    """A report of every cell's score in each category."""

    name: ClassVar[str] = "categories"
    about: ClassVar[str] = (
        "Scores with standard errors over the questions of a category. The column 'questions' counts the questions of "
        "the first column of scores."
    )
    cells: list[CategoryCell]
    tables: list[Block]

    @classmethod
    def make(cls, loaded: Loaded) -> CategoryReport:
        """Make the report on loaded runs. Raises UserError if no task has more than one category."""
        shared = shared_options(loaded)
        cells = [cell for group in loaded.groups for cell in _cells(group, shared)]
        tables = list(_tables(cells))
        if not tables:
            raise UserError(
                "--by category: no task of these runs has more than one category. Leave --by category out for a "
                "report by task."
            )
        shown = {id(cell) for table in tables for _, line in table.lines for cell in line.values()}
        return cls(loaded, [cell for cell in cells if id(cell) in shown], tables)

    def blocks(self) -> Iterator[Block]:
        return iter(self.tables)

    def data(self) -> dict[str, Any]:
        return {"cells": self.lines()}

    def lines(self) -> list[dict[str, Any]]:
        return plain(COLUMNS, self.cells)


def _cells(group: Group, shared: Mapping[str, Mapping[str, Any]]) -> Iterator[CategoryCell]:
    names = group.rows.text("category")
    rows = group.rows.where(names.codes >= 0)
    split = {names.names[code]: names.names[code].split("/") for code in names.present()}
    counts = {len(parts) for parts in split.values()}
    if len(counts) != 1:  # no categories, or "/" is part of a category's name
        split, counts = {name: [name] for name in split}, {1}
    (parts,) = counts
    clusters = clusters_of(rows)
    cells = cells_of(rows, shared)
    marked = {(method, named(budget)) for method, budget, of in cells if evicts(of) and not decode_bounded(of)}
    for part in range(parts):
        kept = {name: parts_of[part] for name, parts_of in split.items()}
        categories = rows.text("category").renamed(kept.get)
        order = sorted(categories.names)
        for (place,), inside in rows.parts(ranks(categories.names)[categories.codes]):
            for method, budget, cell in cells_of(inside, shared):
                yield CategoryCell(
                    task=LENGTH.sub("", group.task),
                    group=group.label,
                    part=part + 1,
                    parts=parts,
                    category=order[place],
                    method=method,
                    budget=budget,
                    marked=(method, named(budget)) in marked,
                    length=length_of(group.task),
                    headline=group.scoring.headline,
                    score=estimate(cell.scores(group.scoring.headline), clusters),
                )


def length_of(task: str) -> int | None:
    """Return the length in a task's name in tokens, such as 8192 for ``ruler/vt@8192``; None if the name states no
    length."""
    length = LENGTH.search(task)
    return int(length[1]) if length else None


def _tables(cells: Sequence[CategoryCell]) -> Iterator[Block]:
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


def _table(title: str, cells: Sequence[CategoryCell], column: Callable[[CategoryCell], str]) -> Block:
    """Return a table with a line for each category, and a column for each method or each length."""
    across = list(dict.fromkeys(column(cell) for cell in cells))
    lines = [(one[0].category, {column(c): c for c in one}) for one in _by(cells, lambda c: c.category)]
    category = Column("", lambda line: line[0], "category")
    parts = [across[start : start + ACROSS] for start in range(0, len(across), ACROSS)]
    grids = [[category, *_shown(names)] for names in parts]
    notes = [UNBOUNDED] if any(cell.marked for cell in cells) else []
    return Block(title=title, lines=sorted(lines, key=lambda line: line[0]), grids=grids, notes=notes)


def _by(cells: Sequence[CategoryCell], key: Callable[[CategoryCell], Any]) -> list[list[CategoryCell]]:
    """Return the cells grouped by a key, in order of first appearance."""
    groups: dict[Any, list[CategoryCell]] = {}
    for cell in cells:
        groups.setdefault(key(cell), []).append(cell)
    return list(groups.values())
