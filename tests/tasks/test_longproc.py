"""LongProc's tasks without pages on made rows with the columns of its files: prompts, levels, scores, wrong data."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
from support.folders import DATA

from kvbench.errors import SetupError
from kvbench.sources.data import BUNDLED, Data
from kvbench.task import Output
from kvbench.taskkit.longproc import COMMIT
from kvbench.taskkit.names import get_task

SAMPLES = DATA / "tasks"
FIRST = {
    "longproc_path_traversal": "path_traversal_0.5k",
    "longproc_tom_tracking": "tom_tracking_0.5k",
    "longproc_countdown": "countdown_0.5k",
    "longproc_travel_planning": "travel_planning_all",
}


def row(name: str) -> dict:
    file = SAMPLES / "longproc" / f"{FIRST[name]}.sample.jsonl"
    return json.loads(file.read_text(encoding="utf-8").splitlines()[0])


def answer(text: str) -> Output:
    return Output(text=text, stop_reason="stop", prompt_tokens=1, output_tokens=1, thinking=False)


def right(name: str, data: dict) -> str:
    """The right answer in the words of the prompt."""
    if name == "longproc_path_traversal":
        return f"<Route>\n{data['answer_nl']}\n</Route>"
    plan = str(data.get("ground_truth_plan")).partition("\n\n")[2]
    return {"longproc_tom_tracking": data.get("solution"), "longproc_travel_planning": f"<Plan>\n{plan}\n</Plan>"}.get(
        name, f"<Solution>\n{data.get('solution_text')}\n</Solution>"
    )


@pytest.mark.parametrize("name", FIRST)
def test_prompts_are_the_official_template(name: str):
    data, task = row(name), get_task(name)
    (doc, *_) = task.docs(Data(SAMPLES, env={}))
    named = {"city_context": data.get("context_nl"), "problem": data.get("disambig_question_text")}
    start, end = data.get("question_repr", (None, None))
    template = (BUNDLED / "longproc" / f"{name.removeprefix('longproc_')}.txt").read_bytes().decode()
    (turn,) = doc.turns
    assert turn.user == template.format(**data | named | {"src_city": start, "dst_city": end})
    assert turn.context
    assert turn.question
    assert doc.doc_id == "0"


@pytest.mark.parametrize("name", FIRST)
def test_scores(name: str):
    data, task = row(name), get_task(name)
    doc = task.docs(Data(SAMPLES, env={}), limit=1)[0]
    full = task.score(doc, answer(right(name, data)))
    assert (full.value, full.partial, full.aux["extraction_rate"], full.aux["no_answer"]) == (1.0, 1.0, 1.0, 0.0)
    none = task.score(doc, answer("I cannot."))
    assert (none.value, none.partial) == (0.0, 0.0)


@pytest.mark.parametrize("level", ["2k", "8k"])
def test_levels_of_trip_plans_are_ranges_of_one_file(level: str):
    docs = get_task(f"longproc_travel_planning/{level}").docs(Data(SAMPLES, env={}))
    (text,) = (doc.turns[0].question for doc in docs)
    assert ("Porto" if level == "2k" else "Turin") in text
    assert get_task(f"longproc_travel_planning/{level}").gen("qwen3").max_new_tokens == {"2k": 3072, "8k": 10240}[level]


def test_rows_come_from_the_archive(tmp_path: Path):
    (tmp_path / "longproc").mkdir()
    inside = f"LongProc-{COMMIT}/data/countdown/countdown_2k.json"
    with zipfile.ZipFile(tmp_path / "longproc" / f"{COMMIT}.zip", "w") as made:
        made.writestr(inside, json.dumps([row("longproc_countdown")] * 200))
    docs = get_task("longproc_countdown/2k").docs(Data(tmp_path, env={}))
    assert [doc.doc_id for doc in docs] == [str(i) for i in range(200)]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("longproc_path_traversal", {"question_repr": ["Aston"]}, "row 1, have a value of a wrong form"),
        ("longproc_path_traversal", {"context_nl": ...}, "have no column 'context_nl'"),
        ("longproc_countdown", {"nums": "no"}, "row 1, have a value of a wrong form"),
        ("longproc_travel_planning", {"estimated_output_tokens": ...}, "without a number in 'estimated_output_tokens'"),
        (
            "longproc_travel_planning",
            {"connected_cities": []},
            "row 1, have a value of a wrong form .no trip plan fits",
        ),
    ],
)
def test_wrong_rows_get_a_line(tmp_path: Path, name: str, change: dict, message: str):
    data = {key: value for key, value in (row(name) | change).items() if value is not ...}
    (tmp_path / "longproc").mkdir()
    (tmp_path / "longproc" / f"{FIRST[name]}.jsonl").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(SetupError, match=f"^data of task '{name}'.*{message}"):
        get_task(name).docs(Data(tmp_path, env={}, allow_mismatch=True))
