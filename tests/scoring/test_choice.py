"""GPQA's extraction rules against recorded results (origin: docs/tasks.md) and on what goldens do not hold."""

from __future__ import annotations

import json

import pytest
from support.folders import DATA

from kvbench.scoring.choice import letter_last, simple_evals

GOLDENS = DATA / "goldens" / "gpqa_extract.jsonl"
ROWS = [json.loads(line) for line in GOLDENS.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("row", [pytest.param(row, id=row["id"]) for row in ROWS])
def test_goldens(row: dict):
    assert simple_evals(row["output"]) == row["simple_evals_extracted"]
    assert (simple_evals(row["output"]) == row["gold"]) is row["expected_simple_evals"]
    assert letter_last(row["output"]) == row["proposed_extracted"]
    assert (letter_last(row["output"]) == row["gold"]) is row["expected_proposed"]


@pytest.mark.parametrize(
    ("text", "last", "first"),
    [
        ("answer: c", "C", "c"),
        ("Answer: $B$", "B", "B"),
        ("\\boxed{A} no. Answer: D", "D", "D"),
        ("Answer: D, so \\boxed{A}", "A", "D"),
        ("\\boxed{\\mathbf{B}}, \\boxed{ C }", "C", None),
        ("\\boxed{\\text{(C)}}", "C", None),
        ("\\boxed{B) 2 s}", "B", None),
        ("\\boxed{CO_2} \\boxed{2} \\boxed{E} \\boxed{}", None, None),
        ("Answer:\nC", None, None),
    ],
)
def test_forms(text: str, last: str | None, first: str | None):
    assert (letter_last(text), simple_evals(text)) == (last, first)


@pytest.mark.parametrize(
    ("text", "thinking", "last"),
    [
        ("<think>Answer: A</think>Answer: B", True, "B"),
        ("Answer: A, hm</think>\n\\boxed{B}", True, "B"),
        ("Answer: A, and then the budget ran", True, None),
        ("<think>Answer: A, and then", None, None),
        ("Answer: A", False, "A"),
        ("<think>Answer: A</think>", True, None),
    ],
)
def test_only_the_answer_part_counts(text: str, thinking: bool | None, last: str | None):
    assert letter_last(text, thinking) == last
    assert simple_evals(text) in ("A", "B")  # the first match anywhere


def test_a_long_output_takes_no_time():
    assert letter_last("\\boxed{ " * 20_000 + "Answer: " * 20_000 + "Answer: C") == "C"
