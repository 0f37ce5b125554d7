"""Finds scores that papers print for the same model, task, method and budget as a cell.

    found = read(tables)
    found.lines, found.reason

The scores come from results/published/published.csv of the checkout. Papers used their own code, prompts and budgets.
The page therefore shows their scores beside a cell's score and draws no conclusion.
"""

from __future__ import annotations

import collections
import csv
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import kvbench
from kvbench.errors import KVBenchError
from kvbench.eviction import choose
from kvbench.eviction.budget import named
from kvbench.report.blocks import estimated
from kvbench.report.page.scored import Scored

Key = tuple[str, ...]  # model, task, method, budget
FILE = Path(kvbench.__file__).parents[1] / "results" / "published" / "published.csv"
SCORE = re.compile(r"accuracy|pass@1( \(.*\))?")  # not "pass@1 gain"
BUDGET = re.compile(r"(\d+)(K?)\b")
OTHER_NAMES = {"full-kv": "full", "snapkv (decode)": "snapkv-decode"}


@dataclass(frozen=True, slots=True)
class Line:
    """A published score beside the score of the cell with the same model, task, method and budget."""

    task: str
    method: str
    budget: str
    own: str
    published: str
    source: str
    notes: str


@dataclass(frozen=True, slots=True)
class Published:
    """The published scores that match a cell of the report. `reason`: why no score matches; empty if one matches."""

    lines: list[Line]
    reason: str


def read(tables: list[Scored]) -> Published:
    if not FILE.is_file():
        return Published([], "This installation has no results/published: only a checkout has the papers' numbers.")
    with open(FILE, encoding="utf-8", newline="") as file:
        printed: dict[Key, list[dict[str, str]]] = collections.defaultdict(list)
        for row in csv.DictReader(file):
            if (key := _key(row)) is not None:
                printed[key].append(row)
    lines = [line for scored in tables for line in _matches(scored, printed)]
    models = ", ".join(sorted({model for scored in tables for model in _models(scored)}))
    count = sum(map(len, printed.values()))
    reason = f"None of the {count} published scores is of model {models} with a task, method and budget of this report."
    return Published(lines, "" if lines else reason)


def _matches(scored: Scored, printed: Mapping[Key, list[dict[str, str]]]) -> Iterator[Line]:
    task, (model, *others) = scored.table.task, _models(scored) or [""]
    cells = [] if others else [cell for cell in scored.table.cells if not math.isnan(cell.score.mean)]
    for cell in cells:
        for row in printed.get((_plain(model.rsplit("/", 1)[-1]), _task(task), cell.method, named(cell.budget)), ()):
            value = f"{float(row['value']):g} {row['unit']}, {row['metric']}"
            own = estimated(cell.score)
            source = f"{row['paper']}, {row['table_or_figure']}"
            yield Line(scored.title, cell.method, named(cell.budget), own, value, source, row["notes"])


def _models(scored: Scored) -> list[str]:
    return sorted({model for rows in scored.parts.values() for model in rows.values("model")})


def _key(row: dict[str, str]) -> Key | None:
    """Return model, task, method and budget of a line of published.csv, in kvbench's names. None if the line has no
    accuracy in percent, no budget in entries, or no method of kvbench."""
    budget = BUDGET.match(row["budget"])
    if row["unit"] != "%" or not SCORE.fullmatch(row["metric"]) or not (budget or row["budget"] == "full"):
        return None
    entries = "-" if budget is None else str(int(budget[1]) * (1024 if budget[2] else 1))
    name = row["method"].lower()
    try:
        method = choose.canonical(OTHER_NAMES.get(name, name))
    except KVBenchError:
        return None
    return _plain(row["model"]), _task(row["task"]), method, entries


def _task(name: str) -> str:
    return _plain(name).removesuffix("diamond")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
