"""Blocks, the parts of a report. A block has lines and columns. One description of a column serves all formats.

    Column("kv_bytes_peak", "kv_bytes_peak", "KV peak", size)    # name, value, header, format
    Block(title="walk", lines=cells, columns=columns, grids=[chosen(columns, ("method", "budget", "KV peak"))])

Text, Markdown and LaTeX show a table for each list of columns in `grids`. CSV and JSON have every column in `columns`
whose name is not empty; the name is its key there.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvbench.eviction.budget import label
from kvbench.report.load import Loaded
from kvbench.report.stats import Estimate, Judged, Paired

NOTHING = "-"
number, percent = "{:.3f}".format, "{:.0%}".format


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a report: one figure that every line of a block has.

    `name`: the column's key in CSV and JSON; empty if it is only in tables. `value`: a function that returns the value
    for a line, or a dotted path of attributes and keys that leads to the value. The value is None if a key on the path
    is missing, or if an attribute before the path's end is None. `header`: the column's title in tables; empty if it is
    only in CSV and JSON. `printed`: a function that formats a value for tables. `left`: whether tables align the column
    to the left; the first column of a table is always aligned to the left.
    """

    name: str
    value: str | Callable[[Any], Any]
    header: str = ""
    printed: Callable[[Any], str] = str
    left: bool = False

    def of(self, line: Any) -> Any:
        """Return the column's value in a line; None for NaN and infinity."""
        value = _attribute(line, self.value) if isinstance(self.value, str) else self.value(line)
        return None if isinstance(value, float) and not math.isfinite(value) else value

    def text(self, line: Any) -> str:
        value = self.of(line)
        return NOTHING if value is None else self.printed(value)


def _attribute(line: Any, path: str) -> Any:
    value = line
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None if value is None else getattr(value, name)
    return value


def plain(columns: Sequence[Column], lines: Sequence[Any]) -> list[dict[str, Any]]:
    """Return every line as a dictionary of plain values, all with the same keys: the columns' names."""
    named = [column for column in columns if column.name]
    return [{column.name: column.of(line) for column in named} for line in lines]


def chosen(columns: Sequence[Column], headers: Sequence[str]) -> list[Column]:
    """Return the columns that have these headers, in the order of `headers`."""
    by_header = {column.header: column for column in columns}
    return [by_header[header] for header in headers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A part of a report: a title, one or more tables, and notes. All tables of a block have the same lines; each table
    has its own columns.

    `lines`: objects, such as cells; a table shows one object per line. `grids`: for each table the columns that it
    shows. `columns`: the columns of CSV and JSON. `facts`: further fields of the block in JSON. `drops_empty`: whether
    tables leave out columns that are empty in every line. The first two columns of a table always stay.
    """

    title: str
    lines: Sequence[Any]
    grids: Sequence[Sequence[Column]]
    columns: Sequence[Column] = ()
    notes: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    drops_empty: bool = False

    def tables(self) -> Iterator[list[Column]]:
        """Yield for each table the columns that it shows."""
        for first, second, *others in self.grids:
            shown = [c for c in others if any(c.text(line) != NOTHING for line in self.lines)]
            yield [first, second, *(shown if self.drops_empty else others)]

    def data(self) -> list[dict[str, Any]]:
        return plain(self.columns, self.lines)

    def document(self) -> dict[str, Any]:
        """Return the block as a JSON object."""
        return {**self.facts, "notes": self.notes, "cells": self.data()}


@dataclass(frozen=True, slots=True)
class Report(ABC):
    """A report on loaded runs, made of blocks. `name`: the stem of its files. `about`: an explanation of the figures,
    which stands below the tables or, in Markdown, above them."""

    name: ClassVar[str]
    about: ClassVar[str]
    loaded: Loaded

    @abstractmethod
    def blocks(self) -> Iterator[Block]:
        """Yield the blocks that text, Markdown and LaTeX show, in order."""

    def head(self) -> Sequence[str]:
        """Return the lines above the first block, in text and Markdown."""
        return ()

    def data(self) -> dict[str, Any]:
        """Return the fields of the JSON document that hold the report's own figures."""
        return {"tables": [block.document() for block in self.blocks()]}

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of the CSV file: a dictionary for every cell, all with the same keys."""
        return [cell for table in self.data()["tables"] for cell in table["cells"]]


def own(*names: str) -> list[Column]:
    """Return columns for CSV and JSON only, each named after the attribute that it shows."""
    return [Column(name, name) for name in names]


def entries(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{value:.1f}"


def with_error(value: float, se: float, *, sign: str = "", digits: int = 3) -> str:
    """Format a value with its standard error, as in "0.512 ±0.034"; the value alone if `se`, the standard error, is
    NaN. An error that would be rounded to zero keeps its first digit."""
    if math.isnan(se):
        return f"{value:{sign}.3f}"
    return f"{value:{sign}.3f} ±{se:.{digits}f}" if se >= 0.5 * 10**-digits else f"{value:{sign}.3f} ±{se:.1g}"


def with_interval(value: float, low: float, high: float) -> str:
    """Format a share with its confidence interval, as in "0.000 (0, 0.125)". Returns the share alone if the ends are
    equal or unknown. Reports print intervals for scores without spread, because a standard error of 0 would mislead.

    Ends other than 0 and 1 have at least three decimals, and more if an end would otherwise look equal to the share.
    """
    if not low < high:  # also if they are NaN
        return f"{value:.3f}"
    near = min((abs(end - value) for end in (low, high) if end != value), default=1.0)
    digits = max(3, -math.floor(math.log10(max(near, 1e-6))))
    ends = ", ".join(f"{end:.{digits}f}" if 0 < end < 1 else f"{end:.0f}" for end in (low, high))
    return f"{value:.3f} ({ends})"


def estimated(score: Estimate, digits: int = 3) -> str:
    """Format a mean score with its standard error, or with its confidence interval if the questions show no spread."""
    if score.se == 0:
        return with_interval(score.mean, score.low, score.high)
    return with_error(score.mean, score.se, digits=digits)


def difference(diff: float, low: float, high: float) -> str:
    """Format a difference with its confidence interval, as in "+0.012 (-0.02, +0.04)". The ends have two decimals, or
    more (up to six) if they are close together. Returns the difference alone if the interval is unknown."""
    if math.isnan(low):
        return f"{diff:+.3f}"
    digits = max(2, -math.floor(math.log10(max(high - low, 1e-6))))
    return f"{diff:+.3f} ({low:+.{digits}f}, {high:+.{digits}f})"


def compared(paired: Paired) -> str:
    """Format the difference of a comparison as `difference` does."""
    return difference(paired.diff, paired.low, paired.high)


def verdict(judged: Judged) -> str:
    """Format a verdict with its adjusted p, as in "worse p=0.012"; "unknown" has no p, because nothing was tested."""
    if judged.verdict == "unknown":
        return judged.verdict
    return f"{judged.verdict} p<0.001" if judged.p < 0.001 else f"{judged.verdict} p={judged.p:.3f}"


def identity(cell: Callable[[Any], Any]) -> list[Column]:
    """Return the columns of a method and its budget. In tables, a method whose generated entries are not bounded by the
    budget is marked. cell: a function that returns the cell of a line."""
    return [
        Column("method", lambda line: cell(line).method),
        Column("", lambda line: starred(cell(line)), "method", left=True),
        *sized(cell),
    ]


def starred(cell: Any) -> str:
    """Return the method of a cell for tables: with an asterisk if the budget does not bound its generated entries."""
    return str(cell.method) + " *" * cell.marked


def sized(cell: Callable[[Any], Any]) -> list[Column]:
    """Return the columns of a budget. cell: a function that returns the cell of a line."""
    return [
        Column("", lambda line: cell(line).budget, "budget", label),
        Column("budget", lambda line: None if isinstance(cell(line).budget, float) else cell(line).budget),
        Column("budget_share", lambda line: cell(line).budget if isinstance(cell(line).budget, float) else None),
    ]


NAMED = identity(lambda line: line)
