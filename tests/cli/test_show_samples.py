"""``kvbench show``: the list of questions, and a question's answers under one prompt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvbench.cli.app import main
from kvbench.store import RunFolder

VERSIONS = {"kvbench_version": "0", "torch_version": "0", "transformers_version": "0"}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two questions, two methods; q1 has no score under gkv."""
    with RunFolder.open(tmp_path, "r1", {"model": "tiny"}, environment=VERSIONS, planned=4) as run:
        with run.journal() as journal:
            for doc in ("q0", "q1"):
                for method in ("full", "gkv"):
                    failed = (doc, method) == ("q1", "gkv")
                    row = {"row_key": f"{doc}{method}", "task": "walk", "doc_id": doc, "sample": 0, "method": method}
                    row |= {"status": "oom" if failed else "ok", "score": None if failed else float(method == "full")}
                    journal.append(row | {"category": "easy"}, prompt=f"prompt of {doc}", output=f"answer of {method}")
        run.seal()
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], results: Path, *argv: str) -> str:
    assert main(["show", "r1", "--out", str(results), *argv]) == 0
    return capsys.readouterr().out


def test_the_prompt_of_several_answers_is_printed_once(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, results, "--sample", "q0")
    assert text.count("prompt of q0") == 1
    assert [line for line in text.splitlines() if line.startswith("answer")] == ["answer of full", "answer of gkv"]
    assert len(json.loads(shown(capsys, results, "--sample", "q0", "--json"))["samples"]) == 2


def test_ids_lists_the_questions(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, _, *lines = shown(capsys, results, "--ids").splitlines()
    assert head.split() == ["task", "id", "category", "rows", "mean", "lowest", "highest"]
    assert [line.split() for line in lines] == [
        ["walk", "q0", "easy", "2", "0.500", "0.000", "1.000"],
        ["walk", "q1", "easy", "2", "1.000", "1.000", "1.000"],
    ]
    (first, _) = json.loads(shown(capsys, results, "--ids", "--json"))["questions"]
    assert (first["id"], first["rows"], first["mean"]) == ("q0", 2, 0.5)


def test_an_unknown_id_names_the_list(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "r1", "--out", str(results), "--sample", "nothing like it"]) == 2
    assert "'kvbench show r1 --ids' lists its 2 questions." in capsys.readouterr().err
    assert main(["show", "r1", "--out", str(results), "--sample", "q0", "--ids"]) == 2
