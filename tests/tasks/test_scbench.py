"""SCBench on made rows with the hub's columns: prompts of every turn, scores per turn, wrong data, a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.folders import DATA

from kvbench.errors import SetupError
from kvbench.scoring.scbench import packages
from kvbench.sources.data import Data
from kvbench.task import Doc, Output, Score
from kvbench.taskkit.names import expand, get_task

ROWS = DATA / "tasks" / "scbench"
WITHOUT = ("repoqa", "repoqa_and_kv")  # sets that need tree-sitter
SETS = [name.partition("/")[2] for name in expand("scbench")]


def docs(name: str) -> list[Doc]:
    if name in WITHOUT:
        pytest.importorskip("tree_sitter_go")
    return get_task(f"scbench/{name}").docs(Data(DATA / "tasks", env={}))


def score(name: str, doc: Doc, *turns: str, thinking: bool = False) -> Score:
    output = Output(
        text=turns[-1], turns=turns, stop_reason="stop", prompt_tokens=1, output_tokens=1, thinking=thinking
    )
    return get_task(f"scbench/{name}").score(doc, output)


def test_sets():
    assert len(SETS) == 12
    assert sum(get_task(f"scbench/{name}").size() or 0 for name in SETS) == 922
    new = {name: get_task(f"scbench/{name}").gen("qwen3").max_new_tokens for name in SETS}
    assert (new["mf"], new["kv"], new["repoqa"], new["summary_with_needles"]) == (5, 150, 1024, 800)


@pytest.mark.parametrize("name", SETS)
def test_right_answers_score_one(name: str):
    row = json.loads((ROWS / f"scbench_{name}.sample.jsonl").read_text(encoding="utf-8").splitlines()[0])
    answers = [turn["answer"] for turn in row["multi_turns"]]
    doc = docs(name)[0]
    found = score(name, doc, *(", ".join(a) if isinstance(a, list) else str(a) for a in answers))
    expected = found.strict if name == "qa_chn" else found.value  # the official rule cannot reach 1
    assert expected == pytest.approx(1.0)
    assert [f"turn_{number}" in found.aux for number in (1, 2)] == [True, True]
    assert found.aux["no_answer"] == 0.0
    wrong = score(name, doc, *["~"] * len(doc.turns))
    assert wrong.value == 0.0


def test_prompts():
    first, later = docs("choice_eng")[0].turns
    assert first.context.startswith("Read the book and answer the question.\n\nAnn lives in York.")
    assert first.context.endswith("Ripon.\n\n")
    asked = "Question: Where does {} live?\nA. Ripon\nB. York\nC. Hull\nD. Leeds\n\nThe the correct answer is"
    assert (first.question, later.user) == (asked.format("Ann"), asked.format("Bob"))
    first, later = docs("mf")[0].turns
    assert first.context == "What is the largest number of the list?\n\n[4, 9, 1, 7]\n\n"
    assert first.question.endswith("no other words. The largest number of the list is: ")
    assert later.user.startswith("What is the smallest number of the list?\n\nYou should answer")
    first, later = docs("summary")[0].turns
    assert (first.answer_prefix, later.answer_prefix) == ("", "This paper")
    assert docs("kv")[0].gen == {"reserve": 1650, "longest": 131072 - 300}


def test_turns_are_scored_one_by_one():
    doc = docs("summary_with_needles")[0]
    found = score("summary_with_needles", doc, "Nothing at all.", "The key: 4711")
    assert found.value == pytest.approx(0.5)
    assert {k: found.aux[k] for k in ("summary", "passkey", "turn_1", "turn_2")} == {
        "summary": 0.0,
        "passkey": 1.0,
        "turn_1": 0.0,
        "turn_2": 1.0,
    }
    few = score("summary_with_needles", doc, "one")
    assert (few.value, few.note) == (None, "the model gave 1 of 2 answers")
    thought = score("kv", docs("kv")[0], "<think>9c</think>x", "<think>7f", thinking=True)
    assert (thought.value, thought.aux["no_answer"]) == (0.0, 0.5)


def test_official_rules_on_characters_have_a_strict_one_beside_them():
    found = score("many_shot", docs("many_shot")[0], "(B)", "(B)")
    assert (found.value, found.strict) == (1.0, 0.5)


def test_functions_compete_with_all_of_their_repository():
    limited = docs("repoqa")[0]
    assert [name for name, _ in limited.reference[0]["needles"]] == ["mul", "add"]
    assert limited.meta["category"] == "python"
    code = [needle for _, needle in limited.reference[0]["needles"]]
    assert score("repoqa", limited, f"```python\n{code[1]}\n```", code[1]).aux["turn_1"] == 0.0


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("kv", {"multi_turns": ...}, "have no column 'multi_turns'"),
        ("kv", {"multi_turns": [{"input": "x"}]}, "have no column 'answer'"),
        ("mf", {"multi_turns": [{"input": "Largest?", "answer": 9}]}, "row 1, have a value of a wrong form"),
        (
            "choice_eng",
            {"multi_turns": [{"input": "?", "answer": "E", "options": ["A", "B", "C", "D"]}]},
            "row 1, have a value of a wrong form",
        ),
        (
            "summary_with_needles",
            {"multi_turns": [{"input": "?", "answer": "E", "task": "other"}]},
            "have no column 'other'",
        ),
    ],
)
def test_wrong_rows_get_a_line(tmp_path: Path, name: str, change: dict, message: str):
    row = json.loads((ROWS / f"scbench_{name}.sample.jsonl").read_text(encoding="utf-8").splitlines()[0])
    data = {key: value for key, value in (row | change).items() if value is not ...}
    (tmp_path / "scbench").mkdir()
    (tmp_path / "scbench" / f"scbench_{name}.jsonl").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(SetupError, match=f"^data of task 'scbench/{name}'.*{message}"):
        get_task(f"scbench/{name}").docs(Data(tmp_path, env={}, allow_mismatch=True))


def test_a_set_without_its_packages_is_refused(monkeypatch: pytest.MonkeyPatch):
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(packages.importlib, "import_module", absent)
    with pytest.raises(SetupError, match=r"needs the package 'rouge_score'"):
        get_task("scbench/summary").docs(Data(DATA / "tasks", env={}))
