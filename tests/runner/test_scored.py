"""A scorer's result becomes columns of a row. If no row can hold the result, the row is stored with a failed status."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from kvbench.runner.rows import scored
from kvbench.store.schema import check_row, read_row
from kvbench.task import Score


@pytest.mark.parametrize(
    ("value", "number"),
    [(True, 1.0), (False, 0.0), (np.float32(0.5), 0.5), (1, 1.0), (1 + 2**-52, 1.0), (-1e-17, 0.0)],
)
def test_numbers_of_other_types(value: float, number: float) -> None:
    row = scored(Score(value=value, strict=value, partial=value))
    assert row["status"] == "ok"
    assert [row["score"], row["score_strict"], row["score_partial"]] == [number] * 3
    assert type(row["score"]) is float


@pytest.mark.parametrize("wrong", [math.nan, math.inf, "1.0", [1.0], 85, 1.01, -0.1], ids=str)
@pytest.mark.parametrize("field", ["value", "strict", "partial"])
def test_a_value_that_is_no_score(wrong: object, field: str) -> None:
    row = scored(Score(**{"value": 1.0, field: wrong}))  # type: ignore[arg-type]
    assert (row["status"], row["score"], row["score_partial"]) == ("grader_error", None, None)
    assert f"the scorer's result cannot be stored: {field} is" in row["note"]


DEEP = json.loads("[" * 100 + "]" * 100)


ODD = [
    (None, "it is 'None', not a Score"),
    (0.5, "it is '0.5', not a Score"),
    (Score(value=1.0, extracted=42), "column extracted: 42 is not text"),  # type: ignore[arg-type]
    (Score(value=1.0, facts={"colour": "red"}), "no column for facts is named 'colour'"),
    (Score(value=1.0, facts={"status": "mine"}), "no column for facts is named 'status'"),
    (Score(value=1.0, facts={"passed_lcb": "yes"}), "column passed_lcb: 'yes' is not bool"),
    (Score(value=1.0, aux={"f1": object()}), "object"),  # type: ignore[dict-item]
    (Score(value=1.0, aux={"f1": DEEP}), "column aux: "),
    (Score(value=1.0, aux={"f1": 2**70}), "column aux: "),
    (Score(value=1.0, aux={"no_answer": "no"}), "could not convert"),  # type: ignore[dict-item]
    (Score(value=1.0, note=["a"]), "column note: ['a'] is not text"),  # type: ignore[arg-type]
    (Score(value=None, status="ok"), "status is 'ok', not unscored, grader_error"),
]


@pytest.mark.parametrize(("result", "why"), ODD, ids=[why for _, why in ODD])
def test_a_result_that_no_row_can_hold(result: Any, why: str) -> None:
    row = scored(result)
    assert (row["status"], row["score"], row["extracted"], row["aux"]) == ("grader_error", None, None, None)
    assert row["note"].startswith("the scorer's result cannot be stored: ")
    assert why in row["note"]
    assert "colour" not in row
    stored = {"row_key": "k", "task": "t", "doc_id": "q", "sample": 0, "method": "full", **row}
    assert read_row(check_row(stored)) is not None


@pytest.mark.parametrize(("share", "none"), [(True, True), (1.0, True), (0.25, False), (0, False), (None, None)])
def test_an_answer_in_some_turns_is_an_answer(share: float | None, none: bool | None) -> None:
    assert scored(Score(value=0.5, aux={} if share is None else {"no_answer": share}))["no_answer"] is none
