"""Rows of data as documents."""

from __future__ import annotations

from typing import Any

import pytest

from kvbench.errors import SetupError
from kvbench.task import Doc, Turn
from kvbench.taskkit.names import get_task
from kvbench.taskkit.rows import documents, visible


def make(row: dict[str, Any]) -> Doc:
    return Doc(doc_id=row["_id"], turns=(Turn(question="?"),), reference=None)


def test_an_id_stands_for_one_row():
    task = get_task("gsm8k")
    assert [doc.doc_id for doc in documents(task, [{"_id": "a"}, {"_id": "b"}], make, ids="_id")] == ["a", "b"]
    with pytest.raises(SetupError, match=r"data of task 'gsm8k': some values of '_id' occur twice"):
        documents(task, [{"_id": "a"}, {"_id": "b"}, {"_id": "a"}], make, ids="_id")


def test_a_missing_column_is_named():
    with pytest.raises(SetupError, match=r"data of task 'gsm8k' have no column '_id'"):
        documents(get_task("gsm8k"), [{"id": "a"}], make)


@pytest.mark.parametrize(
    ("text", "thinking", "shown"),
    [
        ("a\n</think>\n\n b\n", True, " b\n"),
        ("\n b", True, ""),  # a block that never ends
        ("\n b", None, "\n b"),
        ("<seed:think>a</seed:think>\nb", False, "b"),  # the model thinks although it was asked not to
        ("<think>a", None, ""),
    ],
)
def test_what_is_visible_of_a_turn(text: str, thinking: bool | None, shown: str):
    assert visible(text, thinking) == shown
