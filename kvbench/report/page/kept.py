"""Reads recorded decisions, which tell what a method dropped at each eviction. The result has the form that the page
shows: for each token and KV head the number of the eviction that dropped the token.

    kept = read(report)
    kept.answers["5f0c..."]["heads"]["2.1"]      # a character per token: "0" kept to the end, "1" dropped by eviction 1

`kvbench record` records the decisions by letting the model read stored answers again (`kvbench.store.decisions`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.errors import counted
from kvbench.report.page.text import shown
from kvbench.report.scores import ScoreReport
from kvbench.store import decisions, read_texts
from kvbench.store.decisions import Decisions
from kvbench.taskkit.names import is_gated

MOST_BYTES = 600_000
FIRST = ord("0")  # the character of a token that no eviction dropped
MOST_EVICTIONS = 0xD800 - FIRST - 1  # keeps every character below U+D800, the first surrogate


@dataclass(frozen=True, slots=True)
class Kept:
    """The decisions that the page shows. `answers`: by row key, the decisions that the method made while it read the
    row's answer again. `questions`: the (task, question) pairs of these answers. `note`: how many answers have
    decisions on the page and how many are left out, or how to record decisions."""

    answers: dict[str, dict[str, Any]]
    questions: set[tuple[str, str]]
    note: str


def read(report: ScoreReport) -> Kept:
    found: dict[str, dict[str, Any]] = {}
    asked: dict[str, tuple[str, str]] = {}
    taken = left_out = 0
    runs = [path for run in report.loaded.runs if (path := Path(run["path"])).is_dir()]
    for first, rows in _by_answer(runs):
        if first.row_key in found or is_gated(first.task):
            continue
        answer = _answer(first, rows, MOST_BYTES - taken)
        if answer is None:
            left_out += 1
            continue
        taken += len(str(answer))
        found[first.row_key] = answer
        asked[first.row_key] = first.task, first.doc_id
    stored = {key for path in runs for key in _with_prompt(path, set(found))}
    found = {key: answer for key, answer in found.items() if key in stored}
    return Kept(found, {asked[key] for key in found}, _note(len(found), left_out, runs))


def _with_prompt(path: Path, keys: set[str]) -> Iterator[str]:
    """Yield those row keys in `keys` whose prompt the run stores. A run stores no prompts of gated data."""
    if keys:
        texts = read_texts(path, keys=keys)
        yield from texts["row_key"][texts["prompt"].notna()]


def _by_answer(runs: list[Path]) -> Iterator[tuple[Decisions, Iterator[Decisions]]]:
    """Yield for each recorded answer the decisions in the first KV head, and an iterator over the decisions in all KV
    heads."""
    for path in runs:
        for _, group in itertools.groupby(decisions.read(path), key=lambda row: row.row_key):
            rows = iter(group)
            first = next(rows)
            yield first, itertools.chain([first], rows)


def _answer(first: Decisions, rows: Iterator[Decisions], most: int) -> dict[str, Any] | None:
    """Return the decisions on an answer in the form of the page's data. first: the decisions in the first KV head.
    rows: the decisions in every KV head. None if the result has more than `most` characters, or if the answer has more
    than `MOST_EVICTIONS` evictions."""
    if len(first.seen) > MOST_EVICTIONS or len(first.tokens) > most:
        return None
    heads: dict[str, str] = {}
    answer = {
        "prompt": first.prompt,
        "tokens": [shown(token) for token in first.tokens],
        "seen": first.seen,
        "heads": heads,
    }
    left = most - len(str(answer))
    for row in rows:
        heads[f"{row.layer}.{row.head}"] = dropped = "".join(chr(FIRST + n) for n in row.dropped)
        if (left := left - len(dropped)) < 0:
            return None
    return answer if len(str(answer)) <= most else None


def _note(found: int, left_out: int, runs: list[Path]) -> str:
    if found:
        also = f" {left_out} more are left out, to keep the page small." if left_out else ""
        return (
            f"Recorded for {counted(found, 'answer')}: the model read each stored answer again with its own method and "
            f"budget, and evicted at the same tokens as in the run.{also}"
        )
    if left_out:
        return f"Decisions are recorded for {counted(left_out, 'answer')}, but all are too long for a page."
    name = shown(str(runs[0])) if runs else "RUN"
    return f"No decisions are recorded. 'kvbench record {name}' records them for the first question of every task."
