"""The questions of a page: which are there, and the answers beside each prompt."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lxml.html
import pytest

from kvbench.report.load import load
from kvbench.report.page import html, questions
from kvbench.report.scores import ScoreReport
from kvbench.store import RunFolder, decisions, read_rows
from kvbench.store.decisions import Decisions

WAITING = {"status": "unscored", "score": None, "score_partial": None}


def data(text: str) -> dict[str, Any]:
    return json.loads(lxml.html.document_fromstring(text).get_element_by_id("data").text)


def asked(*runs: Path, **options: Any) -> list[dict[str, Any]]:
    return data(html(ScoreReport.make(load(list(runs), **options))))["questions"]


def test_the_answers_of_all_turns_are_shown(make_run: Callable, rows: Callable) -> None:
    cells = [row | {"turns": ("aloha", "bye"), "output": "bye"} for row in rows("full", None, [1.0])]
    cells += [row | {"output": "only one"} for row in rows("gkv", 48, [1.0])]
    [question] = asked(make_run("r", cells))
    assert [answer["output"][0] for answer in question["answers"]] == ["[turn 1]\naloha\n\n[turn 2]\nbye", "only one"]
    prompt, note = question["prompt"]
    assert prompt == question["opening"] == "a prompt"
    assert note.startswith("[turn 1: a run does not store the questions of later turns")
    [plain] = asked(make_run("s", rows("gkv", 48, [1.0])))
    assert plain["prompt"] == ["a prompt", ""]


def test_gated_turns_are_withheld(make_run: Callable, rows: Callable) -> None:
    cells = [row | {"turns": ("one", "two")} for row in rows("full", None, [1.0], task="gpqa_diamond")]
    [question] = asked(make_run("r", cells))
    assert (question["prompt"], question["answers"][0]["output"]) == (["", ""], ["", ""])


def test_runs_of_one_name_keep_their_answers(make_run: Callable, rows: Callable, tmp_path: Path) -> None:
    folders = []
    for seed in (0, 1):
        cells = [row | {"row_key": f"{seed}{row['doc_id']}"} for row in rows("gkv", 48, [1.0, 0.0], seed=seed)]
        with RunFolder.open(tmp_path / f"s{seed}", "q", {}, environment={}, planned=2) as run, run.journal() as journal:
            for row in cells:
                journal.append(row, prompt="a prompt", output="an output")
        folders.append(run.path)
    for question in asked(*folders, group_by=["seed"]):
        assert [answer["run"] for answer in question["answers"]] == [str(folder) for folder in folders]


def test_questions_without_a_score_are_shown(make_run: Callable, rows: Callable) -> None:
    """First those with decisions, then those with scores."""
    scored, waiting = rows("gkv", 48, [1.0, 0.0]), rows("gkv", 48, [1.0] * 4)[2:]
    run = make_run("r", scored, [row | WAITING for row in waiting])
    assert [question["id"] for question in asked(run)] == ["q0", "q1", "q2", "q3"]
    [row] = [row for row in read_rows(run).to_dict("records") if row["doc_id"] == "q3"]
    names = {name: row[name] for name in ("row_key", "task", "doc_id")}
    words = ["word "] * 8
    decisions.write(run, [Decisions(**names, layer=0, head=0, prompt=2, tokens=words, seen=[4], dropped=[0] * 8)])
    page = data(html(ScoreReport.make(load([run]))))
    assert [question["id"] for question in page["questions"]] == ["q3", "q0", "q1", "q2"]
    assert list(page["kept"]) == [page["questions"][0]["answers"][0]["key"]]
    none = make_run("n", [row | WAITING for row in rows("gkv", 48, [1.0] * 20)])
    text = html(ScoreReport.make(load([none])))
    assert len(data(text)["questions"]) == questions.MOST_QUESTIONS
    assert "12 of 20 questions: at most 12 per task" in text
    assert "without a run folder" not in text


@pytest.mark.parametrize("column", ["prompt", "image_list"])
def test_answers_stand_beside_their_own_prompt(make_run: Callable, rows: Callable, column: str) -> None:
    runs, first = [], rows("full", None, [1.0, 1.0])
    for style, scores in (("default", [1.0, 1.0]), ("cot", [0.0, 0.0])):
        cells = [*rows("full", None, scores), *rows("gkv", 48, scores)]
        for row in cells:
            listed = [{"name": style, "width": 4, "height": 2, "tokens": 1, "turn": 1, "at": 0}]
            own = {"prompt": f"{style} asks {row['doc_id']}"} if column == "prompt" else {"image_list": listed}
            row |= own | {"prompt_style": style, "prompt_sha256": style, "row_key": style + row["row_key"]}
        runs.append(make_run(style, cells))
    found = asked(*runs, group_by=["prompt_style"])
    assert [question["id"] for question in found] == ["q0", "q0", "q1", "q1"]
    assert [{answer["run"] for answer in question["answers"]} for question in found] == [{"default"}, {"cot"}] * 2
    if column == "prompt":
        assert [question["prompt"][0] for question in found[:2]] == ["default asks q0", "cot asks q0"]
        assert [question["opening"] for question in found] == ["… q0", "… q0", "… q1", "… q1"]
    else:
        assert ["cot" in question["images"][0] for question in found[:2]] == [False, True]
    assert len(asked(make_run("alone", first))) == 2
