"""Rows against those of NVIDIA/RULER's own generators, and what holds for the rows of every subtask."""

from __future__ import annotations

import hashlib
import json
import random

import numpy as np
import pytest
from support.ruler import DATA, MadeUp, count, room

from kvbench.errors import UserError
from kvbench.taskkit.ruler.make import make_rows
from kvbench.taskkit.ruler.recipes import OFFLINE, SUBTASKS, Row

OFFICIAL = [json.loads(line) for line in (DATA / "official_rows.jsonl").read_text(encoding="utf-8").splitlines()]
# Of all rows at 2048 tokens from made-up material. Other rows are another version of the task.
PINNED = {
    "niah_single_1": "15040e02c4f4453d",
    "niah_single_2": "6c7c8e6733420d68",
    "niah_single_3": "736eec246b7af1a4",
    "niah_multikey_1": "dc291fc5def4898a",
    "niah_multikey_2": "89c04161651eeedf",
    "niah_multikey_3": "27df8a4093085af4",
    "niah_multivalue": "afde8d3c69953d79",
    "niah_multiquery": "16216823732e8d91",
    "vt": "de75824933e2d447",
    "cwe": "6107ca78a8a6840b",
    "fwe": "dbdafa13e9c38a51",
    "qa_1": "6b6b3bfe8e8b04a8",
    "qa_2": "76d7f43da50b6996",
}


@pytest.mark.parametrize("subtask", OFFLINE)
def test_rows_are_the_official_ones(subtask: str):
    expected = [row for row in OFFICIAL if row["task"] == subtask]
    rows = make_rows(subtask, room(subtask, 4096), MadeUp(), 2)
    assert len(expected) == 2
    for row, official in zip(rows, expected, strict=True):
        assert hashlib.sha256(row.prompt.user.encode()).hexdigest() == official["input_sha256"]
        assert row.prompt.answer_prefix == official["answer_prefix"]
        assert list(row.prompt.outputs) == official["outputs"]
        assert row.tokens == official["length"]
        assert row.needle_at == official.get("token_position_answer")


def digest(rows: list[Row]) -> str:
    text = "\n".join(f"{r.prompt.text}{r.prompt.outputs}{r.tokens}{r.needle_at}{r.prompt.cluster}" for r in rows)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@pytest.mark.parametrize("subtask", SUBTASKS)
def test_rows_fit_and_stay_the_same(subtask: str):
    before = random.getstate(), np.random.get_state()[1].tolist()
    rows = make_rows(subtask, room(subtask, 2048, wrapping=7), MadeUp(), 6)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    for row in rows:
        prompt = row.prompt
        assert row.tokens == count(prompt.text) + 7 + room(subtask, 2048).new_tokens
        assert 1024 < row.tokens <= 2048
        assert prompt.question[0].strip()
        assert prompt.context[-1].isspace()
        assert prompt.outputs
    assert [row.prompt for row in make_rows(subtask, room(subtask, 2048, wrapping=7), MadeUp(), 2)] == [
        row.prompt for row in rows[:2]
    ]
    assert digest(rows) == PINNED[subtask]


@pytest.mark.parametrize("subtask", SUBTASKS)
def test_a_length_that_is_too_small_is_an_error(subtask: str):
    with pytest.raises(
        UserError, match=rf"task '{subtask}' (does not fit into 150 tokens|needs an example of at most)"
    ):
        make_rows(subtask, room(subtask, 150), MadeUp(), 1)


def test_a_tokenizer_that_counts_nothing_is_an_error():
    with pytest.raises(UserError, match="makes no tokens of the text 'word'"):
        make_rows("fwe", room("fwe", 4096, count=lambda text: 0), MadeUp(), 1)
