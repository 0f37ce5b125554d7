"""LongBench v2 on made-up rows in its schema."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.folders import DATA
from support.ruler import reader

from kvbench.sources.data import BUNDLED, Data
from kvbench.task import Output, Task
from kvbench.taskkit.names import get_task

SAMPLES = DATA / "tasks"
FILE = SAMPLES / "longbench_v2" / "synthetic_format.jsonl"
ROWS = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


def official(row: dict, file: str) -> str:
    """As the official script fills its templates."""
    text = (BUNDLED / "longbench_v2" / file).read_text(encoding="utf-8").replace("$DOC$", row["context"].strip())
    text = text.replace("$Q$", row["question"].strip())
    for letter in "ABCD":
        text = text.replace(f"$C_{letter}$", row[f"choice_{letter}"].strip())
    return text


def task(name: str = "longbench_v2", context: int = 1 << 20) -> Task:
    made = get_task(name)
    made.reader = reader(context=context)
    return made


def answer(text: str) -> Output:
    return Output(text=text, stop_reason="stop", prompt_tokens=1, output_tokens=1, thinking=False)


@pytest.fixture
def source() -> Data:
    return Data(SAMPLES, env={})


@pytest.mark.parametrize(("name", "file"), [("longbench_v2", "0shot.txt"), ("longbench_v2/cot", "0shot_cot.txt")])
def test_prompts_are_the_official_ones(name: str, file: str, source: Data):
    docs = task(name).docs(source)
    assert [doc.turns[0].user for doc in docs] == [official(row, file) for row in ROWS]
    assert all(doc.turns[0].context.endswith(row["context"].strip() + "\n") for doc, row in zip(docs, ROWS))
    assert [doc.meta["category"] for doc in docs] == ["easy/short", "hard/medium"]


def test_marks_within_a_text_are_filled_as_there(tmp_path: Path):
    row = ROWS[0] | {"context": " A set $Q$ of {x} and $C_A$. \n", "question": "What is $C_B$? "}
    (tmp_path / "longbench_v2").mkdir()
    (tmp_path / "longbench_v2" / "data.json").write_text(json.dumps([row]))
    (doc,) = task().docs(Data(tmp_path, env={}, allow_mismatch=True))
    assert doc.turns[0].user == official(row, "0shot.txt")


def test_the_second_turn_asks_for_the_letter(source: Data):
    (first, second) = task("longbench_v2/cot").docs(source)[0].turns
    assert first.user.endswith("Let’s think step by step:")
    assert second.user.startswith("Based on the above, what is the single, most likely answer choice?")
    assert official(ROWS[0], "0shot_cot_ans.txt").endswith(second.user)


def test_sampling():
    spec = task().gen("qwen3")
    assert (spec.max_new_tokens, spec.temperature, spec.thinking, spec.truncate) == (128, 0.0, False, "middle")
    cot = task("longbench_v2/cot").gen("qwen3")
    assert (cot.max_new_tokens, cot.reserve) == (1024, spec.reserve + 1024)  # room for the second answer


def test_smaller_models_are_asked_the_short_ones_and_told(source: Data):
    small, large = task(context=119_999), task(context=120_000)
    assert [doc.doc_id for doc in small.docs(source)] == ["kvb0"]
    assert small.notes() == [
        "task 'longbench_v2' asks only its 1 questions of length short; "
        "all 503 need a model with a context of 120,000 tokens."
    ]
    assert [doc.doc_id for doc in large.docs(source)] == ["kvb0", "kvb1"]
    assert large.notes() == []


def test_the_number_of_short_questions_is_checked(tmp_path: Path):
    (tmp_path / "longbench_v2").mkdir()
    rows = [ROWS[0] | {"_id": str(i), "length": "short" if i < 180 else "long"} for i in range(503)]
    (tmp_path / "longbench_v2" / "data.json").write_text(json.dumps(rows))
    assert len(task(context=32768).docs(Data(tmp_path, env={}))) == 180
    assert len(task().docs(Data(tmp_path, env={}), limit=7)) == 7


def test_scores(source: Data):
    one = task()
    doc = one.docs(source)[0]
    right = one.score(doc, answer("**The correct answer is (B)**."))
    assert (right.value, right.extracted, right.aux["no_answer"]) == (1.0, "B", 0.0)
    none = one.score(doc, answer("Answer: B"))  # another wording is none, and wrong
    assert (none.value, none.extracted) == (0.0, None)
    assert none.aux == {"no_answer": 1.0, "letter_last": 1.0}
