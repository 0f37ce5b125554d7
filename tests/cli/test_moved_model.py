"""A run whose model folder was moved: it goes on with the folder given again, if that has the same files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbench import tiny
from kvbench.store import read_rows

RUN = "run --method full,knorm --budget 32 --interval 8 --task walk/orbit-100 --limit 1 --max-new-tokens 12 -q"
CALLS = {
    "lost": "run --resume r1 -q",
    "lost score": "score r1 --all -q",
    "absent": "run --resume r1 -q --model there/none",
    "other": "run --resume r1 -q --model ./other",
    "hub": "run --resume r1 -q --model org/model",
    "given": "run --resume r1 --json --model there/m",
    "emptied": "run --resume r2 -q --json --model there/m",
    "score": "score r1 --all -q --model there/m",
    "replay": "replay --run r1 --method knorm --budget 16 --interval 8 -q --model there/m",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moved")
    shutil.copytree(tiny.path(), path / "m", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    return path


@pytest.fixture(scope="module")
def session(calls: Callable, folder: Path) -> dict:
    (made,) = calls(folder, [(f"{RUN} --model ./m --run-name r1".split(), {})])
    assert made.code == 0, made.err
    (folder / "there").mkdir()
    (folder / "m").rename(folder / "there" / "m")
    shutil.copytree(folder / "there" / "m", folder / "other")
    config = json.loads((folder / "other" / "config.json").read_text())
    (folder / "other" / "config.json").write_text(json.dumps(config | {"rope_theta": 5}))
    (folder / "results" / "r2").mkdir()  # the same run before its first row
    record = json.loads((folder / "results" / "r1" / "run.json").read_text())
    (folder / "results" / "r2" / "run.json").write_text(json.dumps(record))
    return dict(zip(CALLS, calls(folder, [(line.split(), {}) for line in CALLS.values()])))


@pytest.mark.parametrize("case", ["lost", "lost score"])
def test_a_lost_model_is_told_with_the_command_that_gives_it(session: dict, case: str) -> None:
    assert session[case].code == 3
    assert session[case].err == (
        "error: model folder './m' of run 'r1' does not exist. If it was moved, give its new path: "
        f"kvbench {CALLS[case]} --model PATH\n"
    )
    assert not session[case].torch


def test_the_folder_may_lie_elsewhere(session: dict, folder: Path) -> None:
    assert session["given"].code == 0, session["given"].err
    assert ": all 2 rows were there already" in session["given"].err
    assert session["emptied"].code == 0, session["emptied"].err
    assert json.loads(session["emptied"].out.splitlines()[-1])["rows_done"] == 2
    first, second = (read_rows(folder / "results" / name) for name in ("r1", "r2"))
    assert set(second["model"]) == {"./m"}
    assert list(first["row_key"]) == list(second["row_key"])


@pytest.mark.parametrize("case", ["score", "replay"])
def test_what_reads_answers_takes_it_too(session: dict, case: str) -> None:
    assert session[case].code == 0, session[case].err


@pytest.mark.parametrize(
    ("case", "code", "words"),
    [
        (
            "absent",
            2,
            "error: --model there/none is not a folder; run 'r1' began with the model in './m'. Give the folder of "
            "that model.\n",
        ),
        (
            "other",
            2,
            "error: --model ./other is not the model './m' that run 'r1' began with; files that differ: config.json. "
            "Give the folder as it was, or start a new run (kvbench run --run-name).\n",
        ),
        ("hub", 2, "error: --model org/model is not a folder; "),
    ],
)
def test_only_the_same_model_is_taken(session: dict, case: str, code: int, words: str) -> None:
    assert session[case].code == code, session[case].err
    assert session[case].err.startswith(words)
