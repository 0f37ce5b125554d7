"""Answers on disk: a training asks no question twice, and comes to the same whether it was killed while it asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbench import tiny
from kvbench.engine.loop import Engine
from kvbench.engine.model.weights import Base
from kvbench.errors import RunInUseError, SetupError, UserError
from kvbench.train import prepare as recipes
from kvbench.train import traces
from kvbench.train.answers import AnswerFile
from kvbench.train.catalogue import RECIPES
from kvbench.train.lock import alone
from kvbench.train.loop import HELD_OUT, LOG, train

SAMPLES, TESTED = 6, 2
ASKED = [{"question": f"# Facts: cod 3{i}, bow 46,\nAsk: cod?\nThink:"} for i in range(5)]

# `prepare` in a process that kills itself after its third answer.
CHILD = f"""
import os, signal, sys
from dataclasses import replace
from pathlib import Path
from kvbench import tiny
from kvbench.train import prepare as recipes
from kvbench.train.catalogue import RECIPES

entry = RECIPES["lookaheadkv"] = replace(RECIPES["lookaheadkv"], held_out={TESTED})
numbers = dict(samples={SAMPLES}, steps=2, lr=1e-3, batch=2, seed=0, device="cpu")
options = dict(entry.options) | dict(entry.tiny)
recipes.prepare("lookaheadkv", str(tiny.path()), data=None, **numbers, options=options, out=Path(sys.argv[1]),
                on_answer=lambda done: done == 3 and os.kill(os.getpid(), signal.SIGKILL))
"""


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in one order
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def engines(monkeypatch) -> list[dict[str, Any]]:
    """Of every engine that answers questions: its sizes, and the questions in the order in which it ended."""
    made: list[dict[str, Any]] = []

    class Watched(Engine):
        def __init__(self, *args: Any, **sizes: Any) -> None:
            made.append({"slots": sizes["slots"], "max_tokens": sizes["max_tokens"], "ended": []})
            super().__init__(*args, **sizes)

        def generate(self, requests: Any) -> Any:
            for answer in super().generate(requests):
                made[-1]["ended"].append(answer.request.doc_id)
                yield answer

    monkeypatch.setattr(traces, "Engine", Watched)
    return made


@pytest.fixture
def prepare(monkeypatch):
    monkeypatch.setitem(RECIPES, "lookaheadkv", entry := replace(RECIPES["lookaheadkv"], held_out=TESTED))
    own = dict(entry.options) | dict(entry.tiny)

    def run(out: Path, data: Path | None = None, seed: int = 0, **options: Any) -> recipes.Ready:
        numbers: dict[str, Any] = {"samples": SAMPLES, "steps": 2, "lr": 1e-3, "batch": 2, "seed": seed}
        out.mkdir(exist_ok=True)
        model, where = str(tiny.path()), str(data) if data else None
        return recipes.prepare(
            "lookaheadkv", model, data=where, options=own | options, device="cpu", out=out, **numbers
        )

    return run


def learn(ready: recipes.Ready, out: Path) -> tuple[bytes, bytes]:
    train(ready.recipe, out, base=Base(name="tiny", config=ready.loaded.model.config))
    return (out / LOG).read_bytes(), (out / HELD_OUT).read_bytes()


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / recipes.ANSWERS).read_text().splitlines()]


def test_a_kill_while_answers_are_collected_changes_nothing(tmp_path, prepare, engines):
    whole = prepare(tmp_path / "whole")
    [asked] = engines
    names = [t.name for t in (*whole.recipe.test, *whole.recipe.traces)]
    assert sorted(asked["ended"]) == sorted(names)
    assert asked["ended"] != names  # the order of traces is not that of the file
    assert [row["name"] for row in lines(tmp_path / "whole")[1:]] == asked["ended"]

    cut = tmp_path / "cut"
    cut.mkdir()
    env = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    killed = subprocess.run([sys.executable, "-c", CHILD, str(cut)], env=env, capture_output=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    file = cut / recipes.ANSWERS
    assert [row["name"] for row in lines(cut)[1:]] == asked["ended"][:3]
    file.write_bytes(file.read_bytes()[:-9])  # as if it had been killed in the middle of a line
    again = prepare(cut)
    assert engines[1]["ended"] == asked["ended"][2:]
    assert engines[1]["slots"] == asked["slots"] == SAMPLES + TESTED
    assert engines[1]["max_tokens"] == asked["max_tokens"]
    assert file.read_bytes() == (tmp_path / "whole" / recipes.ANSWERS).read_bytes()
    assert again.recipe.traces == whole.recipe.traces
    assert again.recipe.test == whole.recipe.test
    assert again.recipe.settings == whole.recipe.settings

    stored = prepare(cut)  # as after a kill in training
    assert len(engines) == 2, "an engine was made although every answer was there"
    assert learn(stored, cut) == learn(whole, tmp_path / "whole")


def test_wrong_answers_are_not_asked_for_again(tmp_path, prepare, engines, monkeypatch):
    monkeypatch.setattr(traces, "judge", lambda answer: lambda text: answer == "right")
    data = tmp_path / "q.jsonl"
    rows = [row | {"answer": "wrong" if i == 3 else "right"} for i, row in enumerate(ASKED)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first = prepare(tmp_path / "out", data)
    assert [t.name for t in first.recipe.traces] == ["line-3", "line-5"]
    assert {row["name"]: row["kept"] for row in lines(tmp_path / "out")[1:]} == {
        f"line-{i}": i != 4 for i in range(1, 6)
    }
    again = prepare(tmp_path / "out", data)
    assert again.recipe.traces == first.recipe.traces
    assert len(engines) == 1

    rows[3]["answer"] = "right"  # another reference is another question
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match="holds answers of another training: other questions"):
        prepare(tmp_path / "out", data)


def test_answers_that_were_asked_otherwise_are_refused(tmp_path, prepare, engines, monkeypatch):
    data = tmp_path / "q.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ASKED))
    out = tmp_path / "out"
    prepare(out, data, longest=2)
    assert {len(row["answer"]) for row in lines(out)[1:]} == {2}
    message = "'.*out' holds answers of another training: {}.* Choose another --out, or remove the folder.$"
    with pytest.raises(UserError, match=message.format("longest 2, now 3; ")):
        prepare(out, data, longest=3)
    with pytest.raises(UserError, match=message.format("seed 0, now 1")):
        prepare(out, data, seed=1, longest=2)
    load = recipes.load
    monkeypatch.setattr(recipes, "load", lambda *args, **how: replace(load(*args, **how), fingerprint="other"))
    with pytest.raises(UserError, match=message.format("another model")):
        prepare(out, data, longest=2)
    assert len(engines) == 1


def test_two_trainings_do_not_ask_into_one_folder(tmp_path, prepare):
    with alone(tmp_path), pytest.raises(RunInUseError, match="is in use by another training"):
        prepare(tmp_path)
    assert not (tmp_path / "answers.jsonl").exists()


def test_only_the_first_process_writes(tmp_path, prepare, engines, monkeypatch):
    first = prepare(tmp_path)
    file = tmp_path / recipes.ANSWERS
    whole = file.read_bytes()
    monkeypatch.setenv("RANK", "1")
    assert prepare(tmp_path).recipe.traces == first.recipe.traces
    assert len(engines) == 1
    file.write_bytes(whole[:-9])  # the first one is about to write
    assert prepare(tmp_path).recipe.traces == first.recipe.traces
    assert len(engines[1]["ended"]) == 1
    assert file.read_bytes() == whole[:-9]
    file.unlink()
    assert prepare(tmp_path).recipe.traces == first.recipe.traces
    assert not file.exists()


def test_a_file_of_answers(tmp_path):
    file = AnswerFile(tmp_path / "a.jsonl", {"model": "m", "seed": 1})
    assert file.read() == {}
    file.add("a", prompt=(1, 2), answer=(3, 4), kept=True)
    file.add("b", prompt=(1,), answer=(5,), kept=False)
    assert file.read() == {"a": (3, 4), "b": None}
    whole = file.path.read_bytes()
    header, *_ = whole.splitlines(keepends=True)
    for end in range(len(header)):  # torn before its first line was whole: nothing is known of it
        file.path.write_bytes(whole[:end])
        assert file.read() == {}
        assert file.path.read_bytes() == header
    for bad in (b"{\n", b"[]\n", b'{"name": "c"}\n'):
        file.path.write_bytes(whole + bad + b"{}\n")
        with pytest.raises(SetupError, match=rf"is damaged after its first {len(whole)} bytes\. Remove it to generate"):
            file.read()
    file.path.unlink()
    file.path.mkdir()
    with pytest.raises(SetupError, match=r"a\.jsonl' cannot be read: is a directory"):
        file.read()
    with pytest.raises(SetupError, match=r"a\.jsonl' cannot be written: is a directory"):
        file.add("a", prompt=(1,), answer=(2,), kept=True)
