"""``kvbench report``: tables over runs. Reads finished and unfinished runs; imports no torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli.draw import draw
from kvbench.cli.options import Text, Texts, plain
from kvbench.config.parsers import choice, parse
from kvbench.console import terminal
from kvbench.errors import IncompleteError, UserError, quote
from kvbench.report import plots

EPILOG = """Examples:
  kvbench report results/demo
  kvbench report results/a results/b --baseline rkv --format markdown
  kvbench report results/demo --format csv > demo.csv
  kvbench report results/demo --html demo.html
  kvbench report results/demo --summary --format latex > demo.tex
  kvbench report results/demo --memory
  kvbench report results/math --by category
  kvbench report results/q4b --published
  kvbench report results/demo --plot figures
  kvbench report results/protection --matched --plot figures
"""
FORMATS = ("text", "markdown", "latex", "csv", "json")
BY = ("category",)


def report(
    runs: Annotated[
        Texts,
        typer.Argument(
            metavar="[RUNS]...", help="Folders of runs. Default: all runs below results.", show_default=False
        ),
    ] = None,
    format: Annotated[str, typer.Option("--format", metavar="FORMAT", help=f"{', '.join(FORMATS)}.")] = "text",
    baseline: Annotated[
        Text, plain("--baseline", "Method to compare all others with. Default: full.", "METHOD")
    ] = None,
    group_by: Annotated[
        Text,
        plain(
            "--group-by",
            "Make one table per value of a column. all: separate tables for everything that differs.",
            "COLUMN",
        ),
    ] = None,
    out: Annotated[Text, plain("--out", "Also write Markdown, CSV and JSON files into DIR.", "DIR")] = None,
    html: Annotated[
        Text, plain("--html", "Also write one HTML page with tables, figures and questions.", "FILE")
    ] = None,
    plot: Annotated[Text, plain("--plot", "Also draw figures into DIR, as SVG and PDF.", "DIR")] = None,
    by: Annotated[Text, plain("--by", "Show the scores of each category of questions.", "category")] = None,
    summary: Annotated[bool, plain("--summary", "Show only the overview, without the tables of each task.")] = False,
    memory: Annotated[
        bool, plain("--memory", "Show the bytes that budgets stand for (nominal) and measured bytes, not scores.")
    ] = False,
    published: Annotated[bool, plain("--published", "Show our scores beside those that papers print.")] = False,
    matched: Annotated[
        bool,
        plain(
            "--matched",
            "Show how much protection and scoring each add to a method's score, from rows with and without --protect.",
        ),
    ] = False,
    require_complete: Annotated[
        bool, plain("--require-complete", "End with exit code 4 if a run is unfinished or unreadable.")
    ] = False,
    json: Annotated[bool, plain("--json", "The same as --format json.")] = False,
) -> None:
    """Tables of quality, memory and speed: each method at each budget, with error bars and paired comparisons."""
    parse("--format", choice(*FORMATS), format)
    if by is not None:
        parse("--by", choice(*BY), by)
    given = {"--memory": memory, "--by": by, "--published": published, "--matched": matched}
    others = [name for name, value in given.items() if value]
    if len(others) > 1:
        raise UserError(f"{' and '.join(others)} are different reports; give one of them.")
    for other in others:
        if html is not None:
            raise UserError(f"--html writes a page of the report of scores; leave out {other}.")
        if baseline is not None:
            raise UserError(f"{other} does not use --baseline; leave out --baseline.")
        if plot is not None and not matched:
            raise UserError(f"--plot draws the reports of scores and of --matched; leave out {other}.")
    if summary and (others or json or format in ("csv", "json")):
        clash = others[0] if others else "--json" if json else f"--format {format}"
        raise UserError(f"--summary shortens the tables of scores as text, markdown or latex; leave out {clash}.")

    from kvbench.report.agree import ALL
    from kvbench.report.blocks import Report
    from kvbench.report.categories import CategoryReport
    from kvbench.report.load import find_runs, load
    from kvbench.report.matched_report import MatchedReport
    from kvbench.report.memory import MemoryReport
    from kvbench.report.published_report import PublishedReport
    from kvbench.report.render import FORMATS as DRAWN
    from kvbench.report.render import write
    from kvbench.report.scores import ScoreReport
    from kvbench.store import resume_command

    if plot is not None:
        plots.check()
    columns = [name.strip().replace("-", "_") for name in group_by.split(",")] if group_by else []
    loaded = load(find_runs(runs or []), columns or ([] if runs else [ALL]), skip=not runs)
    tables: Report
    if memory:
        tables = MemoryReport.make(loaded)
    elif by:
        tables = CategoryReport.make(loaded)
    elif published:
        tables = PublishedReport.make(loaded)
    elif matched:
        tables = MatchedReport.make(loaded)
    else:
        tables = ScoreReport.make(loaded, baseline, summary=summary)
    in_tables = format in ("text", "markdown", "latex") and not json
    for notice in [*loaded.notices, *([] if in_tables else loaded.repeated)]:
        terminal.warning(notice)
    places = {run["run"]: Path(run["path"]) for run in loaded.runs}
    for run, progress in loaded.unfinished.items():
        terminal.warning(f"run {quote(run)} is not finished: {progress}; continue with {resume_command(places[run])}")
    print(DRAWN["json" if json else format](tables))
    if out is not None:
        for path in write(tables, Path(out)):
            print(f"wrote {path}", file=sys.stderr)
    if isinstance(tables, ScoreReport) and html is not None:
        from kvbench.report.page import write as write_page

        print(f"wrote {write_page(tables, Path(html))}", file=sys.stderr)
    if plot is not None and isinstance(tables, ScoreReport):
        draw(plots.figures(tables), plot)
    if plot is not None and isinstance(tables, MatchedReport):
        draw(tables.figures(), plot)
    if loaded.clashes:
        raise UserError("\n".join(loaded.clashes))
    count, lacking = len(loaded.runs) + len(loaded.unread), []
    if loaded.unfinished:
        lacking.append(f"unfinished runs: {len(loaded.unfinished)} of {count}; the warnings say how to continue them.")
    if loaded.unread:
        lacking.append(
            f"unreadable runs: {len(loaded.unread)} of {count}; the warnings state the causes. Repair these runs, or "
            "name the others."
        )
    if require_complete and lacking:
        raise IncompleteError("\n".join(lacking))
