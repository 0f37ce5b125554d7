"""RULER's scores against recorded results of the official scorer, and the stricter rule beside them."""

from __future__ import annotations

import json

import pytest
from support.folders import DATA

from kvbench.scoring import ruler

ROWS = (DATA / "goldens" / "ruler.jsonl").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("row", [pytest.param(row, id=row["id"]) for row in map(json.loads, ROWS)])
def test_official_results(row: dict):
    texts = [ruler.postprocess(text) for text in row["predictions"]]
    metric = getattr(ruler, row["metric"])
    assert metric(texts, row["references"]) == row["expected"]
    single = [
        ruler.score_output(text, references, any_reference=row["metric"] == "string_match_part").value
        for text, references in zip(row["predictions"], row["references"], strict=True)
    ]
    assert [round(100 * value, 2) for value in single] == row["expected_per_row"]


@pytest.mark.parametrize(
    ("text", "clean"),
    [("  a b \n", "a b"), ("a\x00b\tc", "a\nb\nc"), ("\x01 a \x1f", "a"), ("", ""), ("\n\n", ""), ("a\x7fb", "a\x7fb")],
)
def test_postprocess(text: str, clean: str):
    assert ruler.postprocess(text) == clean


@pytest.mark.parametrize(
    ("text", "references", "value", "strict"),
    [
        ("it is 4827193.", ("4827193",), 1.0, 1.0),
        ("it is 48271933", ("4827193",), 1.0, 0.0),
        ("noteworthy", ("no",), 1.0, 0.0),
        ("No.", ("no",), 1.0, 1.0),
        ("pineapple, River", ("apple", "river"), 1.0, 0.5),
        ("a.b", ("a.b",), 1.0, 1.0),
        ("axb", ("a.b",), 0.0, 0.0),
        ("", ("x",), 0.0, 0.0),
    ],
)
def test_whole_words(text: str, references: tuple[str, ...], value: float, strict: float):
    score = ruler.score_output(text, references)
    assert (score.value, score.strict) == (value, strict)
    assert (score.extracted is None) == (value == 0)


def test_a_list_of_other_length_is_an_error():
    with pytest.raises(ValueError, match="zip"):
        ruler.string_match_all(["a"], [["a"], ["b"]])
