"""``kvbench show``: the list of questions, and a question's answers under one prompt."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from kvbench.cli.app import main
from kvbench.store import RunFolder, read_texts

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


def test_only_the_texts_of_the_question_are_read(
    results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[list[str]] = []

    def read_some(folder: Path, keys: set[str] | None = None) -> pd.DataFrame:
        texts = read_texts(folder, keys)
        read.append(sorted(texts["row_key"]))
        return texts

    monkeypatch.setattr("kvbench.cli.samples.read_texts", read_some)
    assert "answer of gkv" in shown(capsys, results, "--sample", "q1")
    assert read == [["q1full", "q1gkv"]]


@pytest.mark.parametrize("stored", [None, "[]", '[{"tokens": 3}]', "[1]"])
def test_images_of_a_question_are_listed_as_data(
    tmp_path: Path, stored: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {"name": "a\x1b[2J.png", "width": 48, "height": 32, "tokens": 6, "turn": 1}
    row = {"row_key": "k", "task": "t", "doc_id": "q", "sample": 0, "method": "full", "status": "ok", "score": 1.0}
    row["extracted"] = "50, 94"
    with RunFolder.open(tmp_path, "r1", {"model": "tiny"}, environment=VERSIONS, planned=1) as run:
        with run.journal() as journal:
            journal.append(row | {"image_list": [facts] if stored is None else stored}, prompt="p", output="o")
        run.seal()
    text = shown(capsys, tmp_path, "--sample", "q")
    assert "-- extracted: 50, 94\n" in text  # not the reference answer
    if stored is None:
        assert "-- image 1: a\\x1b[2J.png, 48x32 pixels, 6 tokens, turn 1\n" in text
    else:
        assert "-- image" not in text


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
    assert f"'kvbench show {results / 'r1'} --ids' lists the questions." in capsys.readouterr().err
    assert main(["show", "r1", "--out", str(results), "--sample", "q0", "--ids"]) == 2
