"""A scorer's result becomes columns of a row; a result that is no number is a failed row, not a lost one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvbench.runner.rows import scored
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
    assert f"the scorer's {field} is" in row["note"]


@pytest.mark.parametrize(("share", "none"), [(True, True), (1.0, True), (0.25, False), (0, False), (None, None)])
def test_an_answer_in_some_turns_is_an_answer(share: float | None, none: bool | None) -> None:
    assert scored(Score(value=0.5, aux={} if share is None else {"no_answer": share}))["no_answer"] is none
