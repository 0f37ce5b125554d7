"""The verdict in a reply against recorded results of FastChat's patterns (origin: docs/tasks.md)."""

from __future__ import annotations

import json

import pytest
from support.folders import DATA

from kvbench.scoring.judge.parse import rating, verdict

GOLDENS = DATA / "goldens" / "mt_bench_parse.jsonl"
ROWS = [json.loads(line) for line in GOLDENS.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("row", [pytest.param(row, id=row["id"]) for row in ROWS])
def test_goldens(row: dict):
    read = {"single_rating": rating, "pairwise": verdict}[row["metric"]]
    assert read(row["judgment"]) == row["expected"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[[8.]]", 8.0),
        ("[[08]]", 8.0),
        ("[[-3]]", -1.0),
        ("[[ 9 ]] [4]", 4.0),
        ("[[[6]]]", 6.0),
        ("[[8]", 8.0),
        ("Rating: 8/10", -1.0),
        ("[[" + "9" * 400 + "]]", float("inf")),
    ],
)
def test_ratings(text: str, expected: float):
    assert rating(text) == expected


def test_a_verdict_is_looked_for_in_the_order_of_letters():
    assert verdict("[[B]], no, [[A]]") == "A"
    assert verdict("[[a]] [[D]]") == "error"
