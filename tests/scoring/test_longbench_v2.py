"""LongBench v2's extraction against recorded results of the official one."""

from __future__ import annotations

import json

import pytest
from support.folders import DATA

from kvbench.scoring.choice import longbench_v2

FILE = DATA / "goldens" / "longbench_v2_extract.jsonl"
ROWS = FILE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("row", [pytest.param(row, id=row["id"]) for row in map(json.loads, ROWS)])
def test_goldens(row: dict):
    assert longbench_v2(row["output"]) == row["extracted"]
    assert (longbench_v2(row["output"]) == row["gold"]) == row["expected"]


def test_bold_type_does_not_matter():
    assert longbench_v2("**The correct answer is (C)**") == longbench_v2("The correct answer is (**C**)") == "C"
    assert longbench_v2("The correct answer is (E)") is None
