"""A run with several tasks, answers and recorded decisions, and its page."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbench.report.load import load
from kvbench.report.page import html
from kvbench.report.scores import ScoreReport
from kvbench.store import decisions, read_rows
from kvbench.store.decisions import Decisions

METHODS = {"full": (None,), "gkv": (48, 64), "h2o": (48, 64), "random": (48, 64)}
CHANCE = {"full": 0.95, "gkv": 0.9, "h2o": 0.6, "random": 0.1}
TASKS = ("walk", "chain")
QUESTIONS = 20
Page = Callable[..., str]


@pytest.fixture
def cells(rows: Callable[..., list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Rows of two tasks, four methods and two budgets."""
    draw = random.Random(0)
    made = []
    for task in TASKS:
        for method, budgets in METHODS.items():
            for budget in budgets:
                scores = [float(draw.random() < CHANCE[method]) for _ in range(QUESTIONS)]
                made += rows(method, budget, scores, task=task, output_tokens=100 + (budget or 0), extracted="01")
    return made


@pytest.fixture
def run(make_run: Callable[..., Path], cells: list[dict[str, Any]]) -> Path:
    folder = make_run("r1", cells)
    rows = read_rows(folder)
    asked = rows[(rows["doc_id"] == "q3") & rows["budget"].notna()]
    decisions.write(folder, [d for row in asked.to_dict("records") for d in recorded(row)])
    return folder


def recorded(row: dict[str, Any]) -> list[Decisions]:
    """Decisions of two layers and two heads: the first eviction drops tokens 0 and 1, the second one more."""
    names = {name: row[name] for name in ("row_key", "task", "doc_id")}
    words = [f"w{i} " for i in range(40)]
    return [
        Decisions(
            **names, layer=layer, head=head, prompt=10, tokens=words, seen=[20, 30],
            dropped=[1, 1, *(2 if i == 5 + layer + head else 0 for i in range(2, 40))],
        )
        for layer in (0, 3)
        for head in (0, 1)
    ]  # fmt: skip


@pytest.fixture
def page() -> Page:
    """page(run, ...): the page of runs, as text."""
    return lambda *runs, **options: html(ScoreReport.make(load(list(runs), **options)))
