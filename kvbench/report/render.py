"""Renders a report as text, Markdown, LaTeX, CSV or JSON. Text that comes from a model or a file is only shown: it is
never executed, and it cannot change the layout.

    print(FORMATS["markdown"](report))         # one string
    write(report, Path("results/demo/report")) # report.md, report.csv, report.json

Control characters are escaped. A value in Markdown cannot break out of its table or carry HTML. A value in CSV gets an
apostrophe in front if a spreadsheet would take the value for a formula.
"""

from __future__ import annotations

import csv
import html
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvbench import __version__
from kvbench.console import terminal
from kvbench.errors import SetupError, quote
from kvbench.report import latex
from kvbench.report.agree import sentence
from kvbench.report.blocks import Column, Report
from kvbench.store import manifest
from kvbench.store.files import own_folder, reason, replacing

ASCII = str.maketrans({"±": "+-", "≤": "<=", "≥": ">="})


def text(report: Report) -> str:
    """Return the report, with tables and notes, as text for a terminal. If the terminal shows ASCII only, signs such as
    ± in the tables are replaced."""
    console = terminal.console()
    with console.capture() as captured:
        if head := report.head():
            console.print("\n".join(map(terminal.clean, head)) + "\n")
        for block in report.blocks():
            console.print(terminal.clean(block.title), style="bold")
            console.print()
            for columns in block.tables():
                console.print(_drawn(columns, block.lines))
                console.print()
            for note in block.notes:
                console.print(terminal.clean(note))
            if block.notes:
                console.print()
        for line in remarks(report):
            console.print(terminal.clean(line))
        console.print(report.about)
    return "\n".join(line.rstrip(" ") for line in captured.get().rstrip("\n").split("\n"))


def markdown(report: Report) -> str:
    lines = [f"# kvbench {report.name}", "", f"kvbench {__version__}. {report.about}", ""]
    lines += [f"{md(line)}\n" for line in report.head()]
    for block in report.blocks():
        lines += [f"## {md(block.title)}", ""]
        for columns in block.tables():
            lines += [*_md_table(columns, block.lines), ""]
        lines += [f"{md(note)}\n" for note in block.notes]
    lines += [f"{md(line)}\n" for line in remarks(report)]
    lines += ["Runs: " + ", ".join(f"{md(run['run'])} ({run['rows']} rows)" for run in report.loaded.runs)]
    return "\n".join(lines)


def latex_text(report: Report) -> str:
    return latex.document(report.blocks(), [*remarks(report), report.about])


def csv_text(report: Report) -> str:
    rows = report.lines()
    if not rows:
        return ""
    target = io.StringIO()
    writer = csv.DictWriter(target, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _csv(value) for key, value in row.items()} for row in rows)
    return target.getvalue().rstrip("\n")


def json_text(report: Report) -> str:
    """Return the report as a JSON document on one line."""
    about = {"kvbench": __version__, "runs": report.loaded.runs, "unfinished": report.loaded.unfinished}
    mixed = [
        {"tasks": tasks, "column": mixture.column, "method": mixture.method, "rows": mixture.counts}
        for mixture, tasks in report.loaded.mixed
    ]
    loaded = report.loaded
    exceptions = {
        "without_rows": loaded.without_rows,
        "mixed": mixed,
        "repeated": loaded.repeated,
        "apart": loaded.apart,
        "clashes": loaded.clashes,
    }
    return json.dumps(about | {k: v for k, v in exceptions.items() if v} | report.data(), allow_nan=False)


FORMATS: dict[str, Callable[[Report], str]] = {
    "text": text,
    "markdown": markdown,
    "latex": latex_text,
    "csv": csv_text,
    "json": json_text,
}
SUFFIXES = {"markdown": "md", "csv": "csv", "json": "json"}  # of the files that are written


def write(report: Report, folder: Path) -> list[Path]:
    """Write the report as Markdown, CSV and JSON into a folder, and return the paths. Raises SetupError if a file
    cannot be written."""
    texts = {f"{report.name}.{suffix}": FORMATS[form](report) for form, suffix in SUFFIXES.items()}
    try:
        in_a_run = (folder.parent / manifest.NAME).is_file()
        if not (in_a_run and own_folder(folder)):  # only a folder outside runs may be a link
            folder.mkdir(parents=True, exist_ok=True)
        for file, content in texts.items():
            with replacing(folder / file) as target:
                target.write((content + "\n").encode())
    except OSError as error:
        raise SetupError(
            f"cannot write the report in {quote(folder)} ({reason(error)}). Give another folder."
        ) from None
    return [folder / file for file in texts]


def remarks(report: Report) -> list[str]:
    """Return the report's notes on unfinished runs, on tasks and rows that are left out, and on rows at several
    intervals. Further notes name allowed differences between the rows of one table, such as versions and devices."""
    loaded = report.loaded
    mixed = [sentence(mixture, tasks) for mixture, tasks in loaded.mixed]
    return [*loaded.unfinished_lines(), *loaded.clashes, *loaded.apart, *loaded.repeated, *mixed]


def _drawn(columns: Sequence[Column], lines: Sequence[Any]) -> Any:
    """Return the lines as a table for a terminal."""
    signs = ASCII if terminal.ascii_only() else {}
    table = terminal.grid()
    for place, column in enumerate(columns):
        table.add_column(terminal.clean(column.header), right=place > 0 and not column.left)
    for line in lines:
        table.add_row(*(terminal.clean(column.text(line).translate(signs)) for column in columns))
    return table


def _md_table(columns: Sequence[Column], lines: Sequence[Any]) -> list[str]:
    """Return the lines of a Markdown table."""
    head = "| " + " | ".join(md(column.header) for column in columns) + " |"
    rule = "|" + "|".join("---" if i == 0 or column.left else "---:" for i, column in enumerate(columns)) + "|"
    return [head, rule, *("| " + " | ".join(md(column.text(line)) for column in columns) + " |" for line in lines)]


def md(value: str) -> str:
    """Escape a text for a field of a Markdown table."""
    escaped = html.escape(terminal.clean(value), quote=False)
    for sign in "\\`|*_[]#~":
        escaped = escaped.replace(sign, f"\\{sign}") if sign in escaped else escaped
    return escaped


def _csv(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return "'" * value.startswith(("=", "+", "-", "@", "\t", "\r")) + terminal.clean(value)
