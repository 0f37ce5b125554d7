"""LongProc's score of tables against recorded results of the official one, and the edges that those do not hold."""

from __future__ import annotations

import json

import pytest
from support.folders import DATA

from kvbench.scoring.html_to_tsv import row_dup_rate, score_tsv

ROWS = (DATA / "goldens" / "html_to_tsv.jsonl").read_text(encoding="utf-8").splitlines()
GOLD = "name\tprice\nAlpha\t1\nBeta\t2"


@pytest.mark.parametrize("row", [pytest.param(row, id=row["id"]) for row in map(json.loads, ROWS)])
def test_goldens(row: dict):
    assert score_tsv(row["prediction"], row["reference"]) == row["expected"]


@pytest.mark.parametrize(
    ("prediction", "f1", "extracted"),
    [
        ("name\tname\nAlpha\t1\nBeta\t2", 0.0, 0.0),  # columns of one name: the official data frame fails
        ("name\nAlpha\nBeta", 0.0, 0.0),  # other number of columns
        ("x\ty\nAlpha\t1\nAlpha\t1\tmore\nBeta\t2", 2 * 1 * (2 / 3) / (1 + 2 / 3), 1.0),  # a row too wide is N/A
        ("x\ty\nAlpha\t1\n\nBeta\t2", 2 * 1 * (2 / 3) / (1 + 2 / 3), 1.0),  # and so is an empty line
        ("x\ty\r\nAlpha\t1\r\nBeta\t2\r\n", 1.0, 1.0),
        ('x\ty\n"Alpha\t1\nBeta\t2', 0.0, 0.0),  # an open quotation mark swallows the rest
        ("x\ty\n" + "z" * 200_000 + "\t1", 0.0, 0.0),  # a cell beyond the csv module's limit
        ("", 0.0, 0.0),
        ("```tsv", 0.0, 0.0),
        ("x\ty\nThe Alpha!\t1\nBETA\t 2 ", 1.0, 1.0),
        ("x\ty\nGamma\t1", 0.0, 1.0),
    ],
)
def test_edges(prediction: str, f1: float, extracted: float):
    found = score_tsv(prediction, GOLD)
    assert (found["f1"], found["extraction_rate"]) == (f1, extracted)


def test_repeated_rows_have_full_precision_and_are_told():
    loop = "```tsv\nname\tprice\n" + "Alpha\t1\n" * 30 + "```"
    assert score_tsv(loop, GOLD)["precision"] == 1.0
    assert row_dup_rate(loop) == pytest.approx(29 / 30)
    assert row_dup_rate(GOLD) == row_dup_rate("no table") == 0.0
