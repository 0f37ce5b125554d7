"""MathArena's competitions on made rows with the hub's columns and types: documents, scores, wrong and missing data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvbench.errors import SetupError
from kvbench.sources.data import Data
from kvbench.task import Doc, Output
from kvbench.taskkit.names import get_task
from kvbench.taskkit.prompts import INSTRUCTION

TYPED = ("hmmt_feb25", "hmmt_nov25", "hmmt_feb26", "brumo25")
HMMT: list[dict[str, Any]] = [
    {
        "problem_idx": 1,
        "problem": "Compute $1/576$.",
        "answer": "\\frac{1}{576}",
        "problem_type": ["Algebra", "Number Theory"],
    },
    {"problem_idx": 2, "problem": "Solve $x^2=3$.", "answer": "\\sqrt{3},-\\sqrt{3}", "problem_type": ["Geometry"]},
]
ROWS: dict[str, list[dict[str, Any]]] = {
    "aime26": [{"problem_idx": 16, "answer": 25, "problem": "Compute $5^2$."}],
    **dict.fromkeys(TYPED, HMMT),
    "apex25": [{"problem_idx": 1, "answer": "2^{2025}-1", "source": "smt_2025", "problem": "Compute $2^{2025}-1$."}],
}


@pytest.fixture(params=sorted(ROWS))
def docs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[Doc]]:
    """A task's name and its documents, read as from the hub."""
    import datasets

    name = request.param
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: datasets.Dataset.from_list(ROWS[name]))
    monkeypatch.setattr("kvbench.sources.data.hub_data._in_datasets_cache", lambda name: True)
    return name, get_task(name).docs(Data(env={}, allow_mismatch=True))


def answer(text: str) -> Output:
    return Output(text=text, stop_reason="stop", prompt_tokens=1, output_tokens=1, thinking=True)


def test_documents_and_scores(docs: tuple[str, list[Doc]]):
    name, found = docs
    task = get_task(name)
    assert [doc.doc_id for doc in found] == [f"{name}-{row['problem_idx']}" for row in ROWS[name]]
    for doc, row in zip(found, ROWS[name], strict=True):
        assert doc.turns[0].user == f"{row['problem']}\n\n{INSTRUCTION}"
        right = task.score(doc, answer(f"hm</think>So \\boxed{{{row['answer']}}}."))
        wrong = task.score(doc, answer("hm</think>So \\boxed{-17.25}."))
        assert (right.value, right.strict, wrong.value, wrong.strict) == (1.0, 1.0, 0.0, 0.0)
        assert ("int_match" in right.aux) is (name == "aime26")
    category = {"aime26": None, "apex25": "smt_2025"}.get(name, "Algebra + Number Theory")
    assert found[0].meta.get("category") == category


@pytest.mark.parametrize("name", sorted(ROWS))
def test_sampling_and_source(name: str):
    task = get_task(name)
    spec, manifest = task.gen("qwen3"), task.manifest
    assert (spec.n, spec.max_new_tokens, spec.temperature, spec.top_k, spec.thinking) == (32, 32768, 0.6, 20, True)
    assert manifest is not None
    assert manifest.hub.startswith("MathArena/")
    assert (manifest.split, len(manifest.revision or "")) == ("train", 40)
    assert manifest.rows == {"hmmt_feb26": 33, "apex25": 12}.get(name, 30)


def test_equal_answers_in_other_forms_are_right(docs: tuple[str, list[Doc]]):
    name, found = docs
    forms = {"aime26": "025", "apex25": "2 \\cdot 2^{2024} - 1"}.get(name, "\\dfrac{2}{1152}")
    assert get_task(name).score(found[0], answer(f"</think>\\boxed{{{forms}}}")).value == 1.0


def data(folder: Path, name: str, rows: list[dict[str, Any]]) -> Data:
    (folder / name).mkdir()
    (folder / name / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return Data(folder, env={}, allow_mismatch=True)


@pytest.mark.parametrize(
    ("name", "column"), [("aime26", "answer"), ("hmmt_feb26", "problem_type"), ("apex25", "source"), ("brumo25", "id")]
)
def test_a_missing_column_is_named(tmp_path: Path, name: str, column: str):
    row = {key: value for key, value in (ROWS[name][0] | {"id": "1"}).items() if key != column}
    with pytest.raises(SetupError, match=f"^data of task '{name}' have no column '{column}'"):
        get_task(name).docs(data(tmp_path, name, [row]))


def test_a_text_in_place_of_a_list_of_types_is_refused(tmp_path: Path):
    row = HMMT[0] | {"id": "1", "problem_type": "Algebra"}
    with pytest.raises(SetupError, match="'problem_type' must be a list of texts, and is the text 'Algebra'"):
        get_task("hmmt_feb25").docs(data(tmp_path, "hmmt_feb25", [row]))


@pytest.mark.parametrize("name", sorted(ROWS))
def test_data_that_are_not_here_get_a_line(tmp_path: Path, name: str):
    text = f"^--data has no data for task '{name}': looked for '.*/{name}/{name}.jsonl'. Give a folder that has it.$"
    with pytest.raises(SetupError, match=text):
        get_task(name).docs(Data(tmp_path, env={}))
