"""A report as text, Markdown, CSV or JSON. No format runs or hides what a model or a file wrote.

    print(FORMATS["markdown"](report))         # one string
    write(report, Path("results/demo/report")) # report.md, report.csv, report.json

Text is cleaned of control characters; Markdown cells cannot break out of their table or carry HTML; CSV cells that a
spreadsheet would take for a formula get an apostrophe. Every kind of report (this one, `categories`, `memory`) says
what its tables are and is drawn by the same few functions.
"""

from __future__ import annotations

import csv
import html
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from kvbench import __version__
from kvbench.console import terminal
from kvbench.errors import SetupError, show
from kvbench.report import averages
from kvbench.report.agree import sentence
from kvbench.report.averages import AverageTable, make_averages
from kvbench.report.columns import cost, flat, quality, samples
from kvbench.report.load import Loaded
from kvbench.report.tables import TaskTable, make_tables
from kvbench.store import manifest
from kvbench.store.files import own_folder, reason, replacing

Columns = Sequence[tuple[str, Callable[[Any], str]]]  # title, and what a line shows below it


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A title with tables below it, each columns and lines, and notes below these."""

    title: str
    grids: Sequence[tuple[Columns, Sequence[Any]]]
    notes: Sequence[str] = field(default_factory=list)


class Drawable(Protocol):
    """What is drawn. `name` is the stem of its files, `about` stands below the tables."""

    name: ClassVar[str]
    about: ClassVar[str]

    @property
    def loaded(self) -> Loaded: ...

    def blocks(self, plus_minus: str) -> Iterator[Block]:
        """For people, in order."""

    def lines(self) -> list[dict[str, Any]]:
        """Every cell as plain data with equal keys, for CSV."""

    def data(self) -> dict[str, Any]:
        """The same by table, for JSON."""


@dataclass(frozen=True, slots=True)
class Report:
    """Quality, cost and comparisons of every cell, and the averages over groups of tasks."""

    name: ClassVar[str] = "report"
    about: ClassVar[str] = (
        "Budget: KV entries per layer and KV head right after an eviction, everything included; entries and bytes are "
        "measured (after an eviction, at the peak), bytes are of one sequence. Errors are standard errors over "
        "questions. Differences are paired by question, with 95% intervals and Holm-adjusted p."
    )
    loaded: Loaded
    tables: list[TaskTable]
    averages: list[AverageTable]

    @classmethod
    def make(cls, loaded: Loaded, baseline: str | None = None) -> Report:
        tables = make_tables(loaded, baseline)
        return cls(loaded, tables, make_averages(loaded.groups, tables))

    def blocks(self, plus_minus: str) -> Iterator[Block]:
        for table in self.tables:
            views = filter(None, (quality(table, plus_minus), cost(table), samples(table)))
            yield Block(title=_title(table), grids=[(view, table.cells) for view in views], notes=table.notes)
            for found in self.averages:  # below the table of their last member
                if found.last is table:
                    grids = [(averages.columns(found, plus_minus), found.rows)] if found.names else []
                    yield Block(title=found.title, grids=grids, notes=found.notes)

    def lines(self) -> list[dict[str, Any]]:
        return [flat(table, cell) for table in self.tables for cell in table.cells]

    def data(self) -> dict[str, Any]:
        tables = [
            {
                "group": table.group,
                "task": table.task,
                "headline": table.headline,
                "notes": table.notes,
                "cells": [flat(table, cell) for cell in table.cells],
            }
            for table in self.tables
        ]
        return {"tables": tables, "averages": [averages.flat(t, row) for t in self.averages for row in t.rows]}


def text(report: Drawable) -> str:
    """Tables for a terminal; ASCII where stdout knows no more."""
    console = terminal.console()
    with console.capture() as captured:
        for block in report.blocks("+-" if terminal.ascii_only() else "±"):
            console.print(terminal.clean(block.title), style="bold")
            console.print()
            for columns, lines in block.grids:
                console.print(_drawn(columns, lines))
                console.print()
            for note in block.notes:
                console.print(terminal.clean(note))
            if block.notes:
                console.print()
        for line in _mixed(report):
            console.print(terminal.clean(line))
        console.print(report.about)
    return captured.get().rstrip("\n")


def markdown(report: Drawable) -> str:
    lines = [f"# kvbench {report.name}", "", f"kvbench {__version__}. {report.about}", ""]
    for block in report.blocks("±"):
        lines += [f"## {md(block.title)}", ""]
        for columns, cells in block.grids:
            lines += [*_md_table(columns, cells), ""]
        lines += [f"{md(note)}\n" for note in block.notes]
    lines += [f"{md(line)}\n" for line in _mixed(report)]
    lines += ["Runs: " + ", ".join(f"{md(run['run'])} ({run['rows']} rows)" for run in report.loaded.runs)]
    return "\n".join(lines)


def csv_text(report: Drawable) -> str:
    rows = report.lines()
    if not rows:
        return ""
    target = io.StringIO()
    writer = csv.DictWriter(target, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _csv(value) for key, value in row.items()} for row in rows)
    return target.getvalue().rstrip("\n")


def json_text(report: Drawable) -> str:
    """One document on one line."""
    about = {"kvbench": __version__, "runs": report.loaded.runs, "unfinished": report.loaded.unfinished}
    mixed = [
        {"tasks": tasks, "column": mixture.column, "method": mixture.method, "rows": mixture.counts}
        for mixture, tasks in report.loaded.mixed
    ]
    return json.dumps(about | ({"mixed": mixed} if mixed else {}) | report.data(), allow_nan=False)


FORMATS: dict[str, Callable[[Drawable], str]] = {"text": text, "markdown": markdown, "csv": csv_text, "json": json_text}
SUFFIXES = {"markdown": "md", "csv": "csv", "json": "json"}  # of the files that are written


def write(report: Drawable, folder: Path) -> list[Path]:
    """Write every file format into a folder and return the paths."""
    texts = {f"{report.name}.{suffix}": FORMATS[form](report) for form, suffix in SUFFIXES.items()}
    try:
        in_a_run = (folder.parent / manifest.NAME).is_file()
        if not (in_a_run and own_folder(folder)):  # a folder that the user names may be a link
            folder.mkdir(parents=True, exist_ok=True)
        for file, content in texts.items():
            with replacing(folder / file) as target:
                target.write((content + "\n").encode())
    except OSError as error:
        raise SetupError(f"cannot write the report in {show(folder)} ({reason(error)}).") from None
    return [folder / file for file in texts]


def _mixed(report: Drawable) -> list[str]:
    """What rows of one table differ in though they may: versions, devices."""
    return [sentence(mixture, tasks) for mixture, tasks in report.loaded.mixed]


def _title(table: TaskTable) -> str:
    parts = [table.task, table.group, f"evicting every {table.interval} tokens" if table.interval else ""]
    return ", ".join(part for part in parts if part)


def _drawn(columns: Columns, lines: Sequence[Any]) -> Any:
    """Lines as a table for a terminal."""
    titles = [title for title, _ in columns]
    table = terminal.grid(*titles, right=tuple(titles[1:]))
    for line in lines:
        table.add_row(*(terminal.clean(value(line)) for _, value in columns))
    return table


def _md_table(columns: Columns, lines: Sequence[Any]) -> list[str]:
    """Lines as those of a Markdown table."""
    head = "| " + " | ".join(md(title) for title, _ in columns) + " |"
    rule = "|" + "|".join("---" if i == 0 else "---:" for i in range(len(columns))) + "|"
    return [head, rule, *("| " + " | ".join(md(value(line)) for _, value in columns) + " |" for line in lines)]


def md(value: str) -> str:
    """Text that stands in a Markdown cell as it is."""
    escaped = html.escape(terminal.clean(value), quote=False)
    for sign in "\\`|*_[]#~":
        escaped = escaped.replace(sign, f"\\{sign}") if sign in escaped else escaped
    return escaped


def _csv(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return "'" * value.startswith(("=", "+", "-", "@", "\t", "\r")) + terminal.clean(value)
