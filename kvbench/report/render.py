"""A report as text, Markdown, CSV or JSON. No format runs or hides what a model or a file wrote.

    print(FORMATS["markdown"](report))         # one string
    write(report, Path("results/demo/report")) # report.md, report.csv, report.json

Text is cleaned of control characters; Markdown cells cannot break out of their table or carry HTML; CSV cells that a
spreadsheet would take for a formula get an apostrophe.
"""

from __future__ import annotations

import csv
import html
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kvbench import __version__, terminal
from kvbench.errors import SetupError, show
from kvbench.report import averages
from kvbench.report.averages import AverageTable, make_averages
from kvbench.report.columns import cost, flat, quality, samples
from kvbench.report.load import Loaded
from kvbench.report.tables import TaskTable, make_tables

C = TypeVar("C")
ABOUT = (
    "Budget: KV entries per layer and KV head right after an eviction, everything included; entries and bytes are "
    "measured (after an eviction, at the peak), bytes are of one sequence. Errors are standard errors over questions. "
    "Differences are paired by question, with 95% intervals and Holm-adjusted p."
)


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a format needs."""

    loaded: Loaded
    tables: list[TaskTable]
    averages: list[AverageTable]

    @classmethod
    def make(cls, loaded: Loaded, baseline: str | None = None) -> Report:
        tables = make_tables(loaded, baseline)
        return cls(loaded, tables, make_averages(loaded.groups, tables))

    def behind(self, table: TaskTable) -> list[AverageTable]:
        """The averages that stand below a table."""
        return [found for found in self.averages if found.last is table]


def text(report: Report) -> str:
    """Tables for a terminal; ASCII where stdout knows no more."""
    console = terminal.console()
    plus_minus = "+-" if terminal.ascii_only() else "±"

    def block(title: str, grids: Sequence[Any], notes: Sequence[str]) -> None:
        console.print(terminal.clean(title), style="bold")
        console.print()
        for grid in grids:
            console.print(grid)
            console.print()
        for note in notes:
            console.print(terminal.clean(note))
        console.print()

    with console.capture() as captured:
        for table in report.tables:
            views = filter(None, (quality(table, plus_minus), cost(table), samples(table)))
            block(_title(table), [drawn(columns, table.cells) for columns in views], table.notes)
            for found in report.behind(table):
                grids = [drawn(averages.columns(found, plus_minus), found.rows)] if found.names else []
                block(found.title, grids, found.notes)
        console.print(ABOUT)
    return captured.get().rstrip("\n")


def markdown(report: Report) -> str:
    lines = ["# kvbench report", "", f"kvbench {__version__}. {ABOUT}", ""]
    for table in report.tables:
        lines += [f"## {md(_title(table))}", ""]
        for columns in filter(None, (quality(table, "±"), cost(table), samples(table))):
            lines += md_table(columns, table.cells)
            lines.append("")
        lines += [f"{md(note)}\n" for note in table.notes]
        for found in report.behind(table):
            lines += [f"## {md(found.title)}", ""]
            lines += [*md_table(averages.columns(found, "±"), found.rows), ""] if found.names else []
            lines += [f"{md(note)}\n" for note in found.notes]
    lines += ["Runs: " + ", ".join(f"{md(run['run'])} ({run['rows']} rows)" for run in report.loaded.runs)]
    return "\n".join(lines)


def csv_text(report: Report) -> str:
    return csv_table([flat(table, cell) for table in report.tables for cell in table.cells])


def json_text(report: Report) -> str:
    """One document on one line."""
    document = {
        "kvbench": __version__,
        "runs": report.loaded.runs,
        "unfinished": report.loaded.unfinished,
        "tables": [
            {
                "group": table.group,
                "task": table.task,
                "headline": table.headline,
                "notes": table.notes,
                "cells": [flat(table, cell) for cell in table.cells],
            }
            for table in report.tables
        ],
        "averages": [averages.flat(table, row) for table in report.averages for row in table.rows],
    }
    return json.dumps(document, allow_nan=False)


FORMATS: dict[str, Callable[[Report], str]] = {"text": text, "markdown": markdown, "csv": csv_text, "json": json_text}
FILES = {"markdown": "report.md", "csv": "report.csv", "json": "report.json"}


def formats(loaded: Loaded, baseline: str | None = None) -> dict[str, Callable[[], str]]:
    """The report in every format, each made when it is called."""
    report = Report.make(loaded, baseline)
    return {name: partial(make, report) for name, make in FORMATS.items()}


def write(report: Report, folder: Path) -> list[Path]:
    """Write every file format into a folder and return the paths."""
    return save({file: FORMATS[name](report) for name, file in FILES.items()}, folder)


def save(texts: Mapping[str, str], folder: Path) -> list[Path]:
    """Write files, by name, into a folder and return the paths."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in texts.items():
            (folder / file).write_text(content + "\n", encoding="utf-8")
    except OSError as error:
        raise SetupError(f"cannot write the report in {show(folder)} ({error.strerror}).") from None
    return [folder / file for file in texts]


def _title(table: TaskTable) -> str:
    parts = [table.task, table.group, f"evicting every {table.interval} tokens" if table.interval else ""]
    return ", ".join(part for part in parts if part)


def drawn(columns: Sequence[tuple[str, Callable[[C], str]]], cells: Sequence[C]) -> Any:
    """Cells as a table for a terminal."""
    titles = [title for title, _ in columns]
    table = terminal.grid(*titles, right=tuple(titles[1:]))
    for cell in cells:
        table.add_row(*(terminal.clean(value(cell)) for _, value in columns))
    return table


def md_table(columns: Sequence[tuple[str, Callable[[C], str]]], cells: Sequence[C]) -> list[str]:
    """Cells as the lines of a Markdown table."""
    head = "| " + " | ".join(md(title) for title, _ in columns) + " |"
    rule = "|" + "|".join("---" if i == 0 else "---:" for i in range(len(columns))) + "|"
    return [head, rule, *("| " + " | ".join(md(value(cell)) for _, value in columns) + " |" for cell in cells)]


def csv_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of equal columns as CSV."""
    target = io.StringIO()
    writer = csv.DictWriter(target, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _csv(value) for key, value in row.items()} for row in rows)
    return target.getvalue().rstrip("\n")


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
