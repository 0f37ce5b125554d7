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
from support.recipes import change, options_of

from kvbench import tiny
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import load
from kvbench.engine.model.weights import Base
from kvbench.errors import RunInUseError, SetupError, UserError
from kvbench.taskkit.prompts import PLAIN, STYLES
from kvbench.train import prepare as recipes
from kvbench.train import traces
from kvbench.train.answers import Answer, AnswerFile, SharedAnswers
from kvbench.train.lock import alone
from kvbench.train.loop import HELD_OUT, LOG, train
from kvbench.train.processes import Processes
from kvbench.train.prompting import Prompting

SAMPLES, TESTED = 6, 2
ASKED = [{"question": f"# Facts: cod 3{i}, bow 46,\nAsk: cod?\nThink:"} for i in range(5)]

# `prepare` in a process that kills itself after its third answer.
CHILD = f"""
import os, signal, sys
from dataclasses import replace
from pathlib import Path
from kvbench import tiny
from kvbench.train import prepare as recipes
from kvbench.registry import recipes as registered
from kvbench.train.catalogue import entry_of
from kvbench.train.entry import FLAGS

entry = registered._members["lookaheadkv"] = replace(entry_of("lookaheadkv"), held_out={TESTED})
numbers = dict(samples={SAMPLES}, steps=2, lr=1e-3, batch=2, seed=0, device="cpu")
options = {{name: value for name, value in entry.settings("tiny").items() if name not in FLAGS}}
recipes.prepare("lookaheadkv", str(tiny.path()), data=None, **numbers, options=options, out=Path(sys.argv[1]),
                on_answer=lambda done: done == 3 and os.kill(os.getpid(), signal.SIGKILL))
"""


class Elsewhere(Processes):
    """Processes of which the first has a folder of its own."""

    def wait(self) -> None:
        pass


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
    entry = change(monkeypatch, "lookaheadkv", held_out=TESTED)
    own = options_of(entry)

    def run(
        out: Path, data: Path | None = None, seed: int = 0, prompting: Prompting | None = None, **options: Any
    ) -> recipes.Ready:
        numbers: dict[str, Any] = {"samples": SAMPLES, "steps": 2, "lr": 1e-3, "batch": 2, "seed": seed}
        numbers["prompting"] = prompting
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
    monkeypatch.setattr(traces, "judge", lambda answer, *_: lambda text: answer == "right")
    data = tmp_path / "q.jsonl"
    rows = [row | {"answer": "wrong" if i == 3 else "right"} for i, row in enumerate(ASKED)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first = prepare(tmp_path / "out", data)
    assert [t.name for t in first.recipe.traces] == ["line-3", "line-5"]
    assert {row["name"]: row["right"] for row in lines(tmp_path / "out")[1:]} == {
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
    prepare(out, data, max_tokens=2)
    assert {len(row["answer"]) for row in lines(out)[1:]} == {2}
    message = "'.*out' holds answers of another training: {}.* Choose another --out, or remove the folder.$"
    with pytest.raises(UserError, match=message.format("max_tokens 2, now 3; ")):
        prepare(out, data, max_tokens=3)
    with pytest.raises(UserError, match=message.format("seed 0, now 1")):
        prepare(out, data, seed=1, max_tokens=2)
    load = recipes.load
    monkeypatch.setattr(recipes, "load", lambda *args, **how: replace(load(*args, **how), fingerprint="other"))
    with pytest.raises(UserError, match=message.format("another model")):
        prepare(out, data, max_tokens=2)
    assert len(engines) == 1


def test_stop_strings_of_a_style_end_answers_and_belong_to_their_settings(tmp_path, prepare, monkeypatch):
    monkeypatch.setitem(STYLES, "lm_eval", replace(PLAIN, stop=("\\",), marker="Ask:"))
    data, out, style = tmp_path / "q.jsonl", tmp_path / "out", Prompting(prompt_style="lm_eval")
    data.write_text("".join(json.dumps(row) + "\n" for row in ASKED))
    ready = prepare(out, data, prompting=style, unfinished="drop")
    assert {ready.loaded.decode(row["answer"]) for row in lines(out)[1:]} == {" \\"}  # without it: " \\ +"
    style_settings = {"stop_strings": ("\\",), "marker": "Ask:"}
    assert ready.recipe.settings.more.items() >= style_settings.items()
    first, *rest = lines(out)
    old = {name: value for name, value in first.items() if name not in style_settings}
    (out / recipes.ANSWERS).write_text("".join(json.dumps(row) + "\n" for row in (old, *rest)))
    with pytest.raises(UserError, match=r"stop_strings none, now .*; marker none, now Ask:"):
        prepare(out, data, prompting=style)


def test_a_given_answer_with_a_token_without_embedding_is_refused(tmp_path, prepare, monkeypatch):
    load = recipes.load

    def with_image_token(*args: Any, **how: Any) -> Any:
        loaded = load(*args, **how)
        more = loaded.model.config.vocab_size - len(loaded.tokenizer)  # tokens up to the last embedding
        names = [*(f"<special {i}>" for i in range(more)), "<image>"]
        loaded.tokenizer.add_special_tokens({"additional_special_tokens": names})
        return loaded

    monkeypatch.setattr(recipes, "load", with_image_token)
    data = tmp_path / "q.jsonl"
    rows = [row | {"response": " cod <image>" if i == 4 else " cod"} for i, row in enumerate(ASKED)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=r"^question 'line-5' holds the token '<image>', for which the model has no"):
        prepare(tmp_path / "out", data, answers="data")


def test_two_trainings_do_not_ask_into_one_folder(tmp_path, prepare):
    with alone(tmp_path), pytest.raises(RunInUseError, match="is in use by another training"):
        prepare(tmp_path)
    assert not (tmp_path / "answers.jsonl").exists()


def test_answers_of_another_process_are_moved_into_the_common_file(tmp_path, prepare, engines):
    """As a kill leaves them: in part already moved, and with a line that was cut short."""
    first = prepare(tmp_path)
    file, part = tmp_path / recipes.ANSWERS, tmp_path / "answers.1.jsonl"
    header, *stored = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([header, *stored[:5]]))
    part.write_bytes(b"".join([header, *stored[3:7], stored[7][:9]]))
    again = prepare(tmp_path)
    assert again.recipe.traces == first.recipe.traces
    assert len(engines[1]["ended"]) == 1
    assert file.read_bytes() == b"".join([header, *stored])
    assert not part.exists()
    part.write_bytes(header.replace(b'"seed":0', b'"seed":1'))
    with pytest.raises(UserError, match="holds answers of another training: seed 1, now 0"):
        prepare(tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
def test_processes_without_a_common_folder_are_told_so(tmp_path, rank):
    apart = Elsewhere(count=2, rank=rank)
    asked = [traces.Question(name=name, ids=(5, 6), max_new_tokens=2) for name in ("a", "b")]
    file = SharedAnswers(tmp_path / "answers.jsonl", {}, apart)
    with pytest.raises(SetupError, match=r"answers of other processes are not in .*; give an --out in a folder that"):
        traces.collect(load(str(tiny.path()), device="cpu"), asked, file=file, processes=apart)


def test_choices_among_answers_ask_nothing_again(tmp_path, prepare, engines):
    """What an answer must be, and how much of it is used, may change when the answers are there."""
    first = prepare(tmp_path)
    longest = max(len(t.answer) for t in (*first.recipe.traces, *first.recipe.test))
    cut = prepare(tmp_path, truncate=3)
    assert [t.answer for t in cut.recipe.traces] == [t.answer[:3] for t in first.recipe.traces]
    least = min(len(t.answer) for t in first.recipe.traces) + 1
    long = prepare(tmp_path, min_tokens=least)
    assert long.recipe.traces == [t for t in first.recipe.traces if len(t.answer) >= least]
    assert len(long.recipe.traces) < len(first.recipe.traces)
    with pytest.raises(UserError, match=f"questions is usable. Dropped answers.* shorter than {longest + 1} tok"):
        prepare(tmp_path, min_tokens=longest + 1)
    assert len(engines) == 1
    with pytest.raises(UserError, match=r"temperature 0\.0, now 0\.6; top_p 1\.0, now 0\.95; top_k 0, now 20"):
        prepare(tmp_path, temperature=0.6, top_p=0.95, top_k=20)


def test_unfinished_answers_are_dropped_where_asked(tmp_path, prepare, engines):
    data = tmp_path / "q.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ASKED))
    assert len(prepare(tmp_path / "out", data, max_tokens=2).recipe.traces) == 3
    assert {row["ended"] for row in lines(tmp_path / "out")[1:]} == {False}
    with pytest.raises(UserError, match=r"Dropped answers.*: 5 unfinished"):
        prepare(tmp_path / "out", data, max_tokens=2, unfinished="drop")
    assert len(engines) == 1


def test_sampled_answers_follow_from_the_seed(tmp_path, prepare):
    drawn = {"temperature": 3.0, "top_k": 5, "wrong": "keep"}
    first, again = (prepare(tmp_path / name, **drawn).recipe for name in ("a", "b"))
    assert (first.traces, first.test) == (again.traces, again.test)
    greedy, other = prepare(tmp_path / "c", wrong="keep").recipe, prepare(tmp_path / "d", top_p=0.01, **drawn).recipe
    assert first.traces != greedy.traces
    assert other.traces == greedy.traces  # only the likeliest token is in so small a set


def test_a_file_of_answers(tmp_path):
    path, asked = tmp_path / "a.jsonl", {"model": "m", "seed": 1}
    file, shared = AnswerFile(path, asked), SharedAnswers(path, asked)
    assert shared.gather() == {}
    answers = {"a": Answer((3, 4), right=True, ended=True), "b": Answer((5,), right=False, ended=True)}
    shared.add("a", (1, 2), answers["a"])
    shared.add("b", (1,), answers["b"])
    assert shared.gather() == answers
    whole = path.read_bytes()
    header, *_ = whole.splitlines(keepends=True)
    for end in range(len(header)):  # torn before its first line was whole: nothing is known of it
        path.write_bytes(whole[:end])
        assert file.rows() == {}
        assert path.read_bytes() == b""
    shared.add("a", (1, 2), answers["a"])
    shared.add("b", (1,), answers["b"])
    assert path.read_bytes() == whole
    for bad in (b"{\n", b"[]\n", b'{"name": "c"}\n'):
        path.write_bytes(whole + bad + b"{}\n")
        with pytest.raises(SetupError, match=rf"is damaged after its first {len(whole)} bytes\. Remove it to generate"):
            file.rows()
    path.unlink()
    path.mkdir()
    with pytest.raises(SetupError, match=r"a\.jsonl' cannot be read: is a directory"):
        file.rows()
    with pytest.raises(SetupError, match=r"a\.jsonl' cannot be written: is a directory"):
        shared.add("a", (1,), answers["a"])
