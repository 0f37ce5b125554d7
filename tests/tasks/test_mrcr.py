"""MRCR on made rows with the hub's columns: prompts, ranges of lengths, scores, wrong and missing data, a run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.folders import DATA

from kvbench.errors import SetupError, UserError
from kvbench.sources.data import Data
from kvbench.task import Doc, Output, Score
from kvbench.taskkit.names import expand, get_task

FILE = DATA / "tasks" / "mrcr" / "mrcr.sample.jsonl"
ROWS = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


def docs(name: str, *, words: bool = False) -> list[Doc]:
    """The documents of a task, by a model that counts words, or without a model."""
    task: Any = get_task(name)
    if words:
        task.reader = SimpleNamespace(count=lambda text: len(text.split()))
    return task.docs(Data(DATA / "tasks", env={}))


def score(doc: Doc, text: str, thinking: bool = False) -> Score:
    output = Output(text=text, stop_reason="stop", prompt_tokens=1, output_tokens=1, thinking=thinking)
    return get_task("mrcr").score(doc, output)


def test_names():
    assert expand("mrcr@32k") == [f"mrcr/{n}needle@32768" for n in (2, 4, 8)]
    assert len(expand("mrcr/8needle@*")) == 8


def test_prompts():
    first, second = docs("mrcr/2needle")
    (turn,) = first.turns
    assert [role for role, _ in turn.history] == ["user", *["user", "assistant"] * 4]
    assert turn.history[1][1] == "write a poem about tapirs"
    assert turn.question == (
        "Prepend aYo7SG8CQg to the 2nd (1 indexed) poem about tapirs. Do not include any other text in your response."
    )
    assert (first.doc_id, first.meta["category"], second.meta["category"]) == (
        "2needle-0",
        "depth 050%",
        "depth 010%",
    )
    assert first.reference == {"prefix": "aYo7SG8CQg", "answer": ROWS[0]["answer"]}
    assert [len(docs(f"mrcr/{n}needle")) for n in (2, 4, 8)] == [2, 1, 1]


def test_a_length_has_the_rows_between_its_half_and_itself():
    texts = [message["content"] for message in json.loads(ROWS[0]["prompt"])] + [ROWS[0]["answer"]]
    assert 64 < sum(len(text.split()) for text in texts) <= 128
    assert len(docs("mrcr/2needle@128", words=True)) == 2
    for name in ("mrcr/2needle@64", "mrcr/2needle@256"):
        with pytest.raises(UserError, match=f"^task '{name}' has no conversation of more than "):
            docs(name, words=True)


def test_scores():
    doc = docs("mrcr/2needle")[0]
    right = doc.reference["answer"]
    assert (score(doc, right).value, score(doc, f"hm\n</think>\n\n{right}", thinking=True).value) == (1.0, 1.0)
    without = score(doc, right.removeprefix("aYo7SG8CQg"))
    assert (without.value, without.aux) == (0.0, {"similarity": 1.0, "prefix": 0.0})
    other = score(doc, ROWS[1]["answer"].replace("Zk31xPwq0B", "aYo7SG8CQg"))  # the other poem
    assert 0.7 < (other.value or 0.0) < 1.0
    assert score(doc, "").value == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "Write!"}, "row 1, have a value of a wrong form"),
        ({"prompt": "[]"}, "row 1, have a value of a wrong form"),
        ({"prompt": None}, "row 1, have a value of a wrong form"),
        ({"prompt": "[" * 100_000}, "row 1, have a value of a wrong form"),
        ({"prompt": '[{"role": "user"}]'}, "have no column 'content'"),
        ({"answer": ...}, "have no column 'answer'"),
        ({"desired_msg_index": "last"}, "row 1, have a value of a wrong form"),
    ],
)
def test_wrong_rows_get_a_line(tmp_path: Path, change: dict[str, Any], message: str):
    row = {key: value for key, value in (ROWS[0] | change).items() if value is not ...}
    (tmp_path / "mrcr").mkdir()
    (tmp_path / "mrcr" / "mrcr.jsonl").write_text(json.dumps(row), encoding="utf-8")
    with pytest.raises(SetupError, match=f"^data of task 'mrcr/2needle@8192'.*{message}"):
        get_task("mrcr/2needle").docs(Data(tmp_path, env={}, allow_mismatch=True))


def test_data_that_are_not_here_get_a_line(tmp_path: Path):
    with pytest.raises(SetupError, match=r"^--data has no data for task 'mrcr/4needle@8192': looked for "):
        get_task("mrcr/4needle").docs(Data(tmp_path, env={}))
