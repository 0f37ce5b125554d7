"""Recorded decisions as the page shows them: for each token the eviction that dropped it.

    kept = read(report, limit=600_000)
    kept.answers["5f0c..."]["heads"]["2.1"]      # one character per token: "0" held to the end, "1" dropped first

`kvbench record` made them by reading the stored answers again (`kvbench.store.decisions`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.report.page.text import shown
from kvbench.report.scores import ScoreReport
from kvbench.store import decisions
from kvbench.store.decisions import Decisions
from kvbench.taskkit.names import is_gated

MOST_BYTES = 600_000
FIRST = ord("0")  # eviction 0: none
MOST_EVICTIONS = 0xD800 - FIRST - 1  # below the surrogates


@dataclass(frozen=True, slots=True)
class Kept:
    """Decisions by row key. `questions`: the (task, question)s that have some. `note`: what is left out, or how to
    record some."""

    answers: dict[str, dict[str, Any]]
    questions: set[tuple[str, str]]
    note: str


def read(report: ScoreReport) -> Kept:
    found: dict[str, dict[str, Any]] = {}
    questions: set[tuple[str, str]] = set()
    taken = left_out = 0
    runs = [path for run in report.loaded.runs if (path := Path(run["path"])).is_dir()]
    for rows in _by_answer(runs):
        if rows[0].row_key in found or is_gated(rows[0].task):
            continue
        answer = _answer(rows)
        taken += (size := len(str(answer)))
        if taken > MOST_BYTES or len(rows[0].seen) > MOST_EVICTIONS:
            taken, left_out = taken - size, left_out + 1
            continue
        found[rows[0].row_key] = answer
        questions.add((rows[0].task, rows[0].doc_id))
    return Kept(found, questions, _note(len(found), left_out, runs))


def _by_answer(runs: list[Path]) -> Iterator[list[Decisions]]:
    for path in runs:
        for _, rows in itertools.groupby(decisions.read(path), key=lambda row: row.row_key):
            yield list(rows)


def _answer(rows: list[Decisions]) -> dict[str, Any]:
    first = rows[0]
    return {
        "prompt": first.prompt,
        "tokens": [shown(token) for token in first.tokens],
        "seen": first.seen,
        "heads": {f"{row.layer}.{row.head}": "".join(chr(FIRST + n) for n in row.dropped) for row in rows},
    }


def _note(found: int, left_out: int, runs: list[Path]) -> str:
    if found:
        also = f" {left_out} more are left out, to keep the page small." if left_out else ""
        return (
            f"Recorded for {found} answers: the model read each stored answer again with its own method and budget, "
            f"and evicted at the same tokens as in the run.{also}"
        )
    if left_out:
        return f"{left_out} answers have recorded decisions, all too long for a page."
    name = shown(str(runs[0])) if runs else "RUN"
    return f"No decisions are recorded. 'kvbench record {name}' records them for the first question of every task."
