"""Scorers against recorded results of the official ones (origin of each file: docs/tasks.md)."""

from __future__ import annotations

import json

import pytest
from support.folders import DATA, SHARED

from kvbench.scoring.boxed import after_thinking, last_box
from kvbench.scoring.gsm8k import lm_eval_filters
from kvbench.scoring.math import score_math

HERE = DATA / "goldens"
WHOLE = SHARED / "goldens" / "open"  # the full set, where the project has it


def rows(name: str) -> list:
    file = next(folder / name for folder in (WHOLE, HERE) if (folder / name).is_file())
    return [pytest.param(row, id=row["id"]) for row in map(json.loads, file.read_text(encoding="utf-8").splitlines())]


@pytest.mark.parametrize("row", rows("math.jsonl"))
def test_math(row: dict):
    score = score_math(row["output"], row["gold"], thinking=row["thinking"])
    assert score.value == float(row["expected"])
    assert score.strict == float(row["expected_strict_boxed"])
    assert last_box(after_thinking(row["output"], row["thinking"])) == row["strict_extracted"]


@pytest.mark.parametrize("row", rows("gsm8k_filters.jsonl"))
def test_gsm8k_filters(row: dict):
    expected = {"lm_eval_strict": row["expected_strict"], "lm_eval_flexible": row["expected_flexible"]}
    assert lm_eval_filters(row["output"], row["gold"]) == expected
