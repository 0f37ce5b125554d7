"""Renders a report as one HTML file: `page.html` with `page.css` and the scripts inline.

    write(report, Path("report.html"))

The page loads nothing (`kvbench.report.page.template`). The script reads its data from one JSON element and puts them
into the page as text; no character of the data can end the element. SVG comes from vl-convert, which escapes the texts
of a figure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvbench import __version__
from kvbench.eviction.budget import named, order
from kvbench.report.agree import sentence
from kvbench.report.blocks import Block
from kvbench.report.load import Loaded
from kvbench.report.overview import overview
from kvbench.report.page import blocks, figures, kept, lengths, matrix, published, questions, scored, template
from kvbench.report.page.text import shown
from kvbench.report.scores import ScoreReport, block
from kvbench.store import manifest

SCRIPTS = ("page.js", "questions.js", "tokens.js")  # joined into the page's one script, in this order
FORMATS: dict[str, Any] = {  # functions and constants of the template
    "lines": blocks.lines,
    "verdict_in": blocks.verdict_in,
    "verdicts": blocks.VERDICTS,
    "size": named,
    "number": "{:.3f}".format,
    "signed": "{:+.3f}".format,
    "whole": lambda value: f"{value:,.0f}" if value == value else "-",
    "percent": lambda value: f"{value:.0%}" if value == value else "-",
}
ENDING = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}  # may end a script element or a script's line


def html(report: ScoreReport) -> str:
    """Return the page's HTML."""
    shown.cache_clear()
    return template.render("page.html", _values(report), SCRIPTS)


def write(report: ScoreReport, path: Path) -> Path:
    """Write the page to `path`. An older file there is replaced. Raises SetupError if the file cannot be written."""
    return template.write(html(report), path)


def _values(report: ScoreReport) -> dict[str, Any]:
    """Return the variables of the page's template."""
    tables = list(scored.read(report))
    decisions = kept.read(report)
    asked = questions.read(report, tables, decisions.questions)
    return {
        **FORMATS,
        "about": report.about,
        "version": __version__,
        "runs": [{**run, **_settings(Path(run["path"]))} for run in report.loaded.runs],
        "notices": list(_notices(report.loaded)),
        "tasks": [one.title for one in tables],
        "methods": list(dict.fromkeys(method for one in tables for method, _ in one.cells)),
        "budgets": _budgets(report),
        "overview": list(overview(report.tables)),
        "cells": list(_cells(report)),
        "matrices": [(one, matrix.matrices(one)) for one in tables],
        "lengths": [
            (one.title, method, budget, lengths.lengths(rows))
            for one in tables
            for (method, budget), rows in one.parts.items()
        ],
        "published": published.read(tables),
        "figures": figures.read(report),
        "questions": asked,
        "kept": decisions,
        "data": _json({"runs": len(report.loaded.runs), "questions": asked.questions, "kept": decisions.answers}),
    }


def _budgets(report: ScoreReport) -> list[str]:
    """Return the texts of all budgets in the order of the page's filter: no budget, numbers of entries, shares of the
    prompt. Numbers and shares are sorted by size."""
    budgets = [cell.budget for table in report.tables for cell in table.cells]
    sizes = {named(budget): order(-1 if budget is None else budget) for budget in budgets}
    return sorted(sizes, key=sizes.__getitem__)


def _notices(loaded: Loaded) -> Iterator[str]:
    yield from (*loaded.notices, *loaded.repeated, *loaded.clashes, *loaded.apart)
    yield from loaded.unfinished_lines()
    for mixture, tasks in loaded.mixed:
        yield sentence(mixture, tasks)


def _cells(report: ScoreReport) -> Iterator[tuple[str, Block]]:
    """Yield (title, block) for each block of the report below the overview. title: the title of the task's table to
    which the block belongs."""
    for table in report.tables:
        for one in (block(table), *(averages.block() for averages in report.averages if averages.last is table)):
            yield scored.title(table), one


def _settings(path: Path) -> dict[str, Any]:
    """Return model, date and versions from a run's run.json; empty texts for a table without a run folder."""
    if not path.is_dir():
        return {"model": "", "created": "", "versions": ""}
    info = manifest.read(path)
    versions = info["environment"].get("versions") or {}
    return {
        "model": info["config"].get("model", ""),
        "created": info["created"],
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }


def _json(data: Any) -> str:
    """Return JSON in which no character can end the script element around it."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).translate(ENDING)
