"""Rows are checked when they are written, not when the table is made."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.folders import ROOT

from kvbench.store.frames import rows_schema, to_table
from kvbench.store.schema import COLUMNS, DETERMINISTIC, NAMES, check_row, clean_text, natural, read_row, sort_key

Row = Callable[..., dict[str, Any]]


def test_every_column_is_described_and_named_once() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert all(c.meaning and c.varies in ("", "timing", "host") for c in COLUMNS)
    assert {"score", "row_key", "output_sha256"} <= set(DETERMINISTIC)
    assert not {"created", "decode_seconds", "torch_version", "slots"} & set(DETERMINISTIC)


def test_the_manual_shows_the_columns_as_they_are() -> None:
    manual = (ROOT / "docs" / "results.md").read_text()
    for c in COLUMNS:
        assert f"| `{c.name}` | {c.kind} | {c.unit} | {c.meaning} | {c.varies} |" in manual


def test_a_checked_row_has_all_columns_in_json_types(row: Row) -> None:
    checked = check_row(row(1, score=np.float32(0.5), sample=np.int64(3), created=datetime(2026, 1, 2, tzinfo=UTC)))
    assert tuple(checked) == NAMES
    assert json.loads(json.dumps(checked)) == checked
    assert (checked["seed"], checked["options"]) == ("18446744073709551615", '{"alpha":0.5,"window":8}')
    assert (checked["score"], checked["sample"], checked["created"]) == (0.5, 3, "2026-01-02T00:00:00.000000+00:00")


def test_times_are_stored_in_utc(row: Row) -> None:
    east = timezone(timedelta(hours=2))
    assert check_row(row(1, created=datetime(2026, 1, 2, 1, tzinfo=east)))["created"].startswith("2026-01-01T23:00")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float64("nan")])
def test_numbers_that_are_none_become_null(row: Row, value: float) -> None:
    checked = check_row(row(1, tokens_per_second=value, aux={"recall": value, "f1": 1.0}))
    assert checked["tokens_per_second"] is None
    assert checked["aux"] == '{"f1":1.0,"recall":null}'


@pytest.mark.parametrize(
    "wrong",
    [
        {"colour": "red"},
        {"budget": "512"},
        {"budget": 2**31},
        {"budget": True},
        {"sample": 1.5},
        {"score": "1"},
        {"decode_bounded": 1},
        {"created": datetime(2026, 1, 1)},
        {"aux": "{"},
        {"task": None},
        {"row_key": ""},
        {"method": None},
        {"doc_id": ""},
        {"sample": None},
        {"status": "oom", "score": 0.0},
    ],
)
def test_a_row_that_does_not_fit_is_refused_at_once(row: Row, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"column|status|JSON|Expecting"):
        check_row(row(1, **wrong))


@pytest.mark.parametrize(
    "wrong", [{"method": None}, {"doc_id": None}, {"sample": None}, {"score_pass": 2**31 - 1}, {"score_pass": -1}]
)
def test_a_row_that_kvbench_never_writes_is_damage(row: Row, wrong: dict[str, Any]) -> None:
    whole = check_row(row(1, score_pass=3))
    assert read_row(whole) == whole
    assert read_row(whole | wrong) is None


def test_a_failed_row_may_lack_everything_but_its_identity() -> None:
    named = {"row_key": "k", "task": "walk", "doc_id": "q0", "sample": 0, "method": "gkv", "status": "oom"}
    table = to_table([check_row(named)])
    assert table.schema == rows_schema()
    assert table.column("score").null_count == 1


def test_secrets_are_hidden_where_they_may_stand(row: Row) -> None:
    token = "hf_" + "A" * 30
    checked = check_row(row(1, note=f"401 for {token}", model=f"https://me:pw@hub/x?token={token}"))
    assert token not in json.dumps(checked)
    assert ":pw@" not in checked["model"]


@given(st.text(st.characters(), max_size=50))  # surrogates included
def test_any_text_can_be_stored(text: str) -> None:
    cleaned = clean_text(text)
    assert pa.array([cleaned]).to_pylist() == [cleaned]
    assert cleaned == text or any("\ud800" <= c <= "\udfff" for c in text)


def test_documents_are_ordered_as_people_count() -> None:
    assert sorted(["q10", "q2", "q1a", "q1", "q007"], key=natural) == ["q1", "q1a", "q2", "q007", "q10"]
    natural("9" * 10_000)  # longer than int() takes
    assert sort_key({"row_key": "a"}) < sort_key({"row_key": "b"})
