"""Runs of tasks with pictures on a small random Qwen3-VL: vneedle to its end and after a kill; changed pictures."""

from __future__ import annotations

import base64
import json
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import transformers
from support import judges, vision
from support.commands import Command, Ended, end_all, watch
from support.final_tables import differences
from support.judges import KEY, say

from kvbench.engine.model.random_weights import draw
from kvbench.engine.model.weights import Base, save_weights
from kvbench.eviction.choose import make
from kvbench.scoring.judge.dialogue import DIMENSIONS
from kvbench.store import read_run

serve = judges.serve  # the fixture
METHODS = ("full", "gkv", "rkv", "h2o", "retention")
LIMIT = 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-VL with random gates for `retention` beside it."""
    folder = vision.repository(tmp_path_factory.mktemp("vision") / "vl")
    whole = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    gates = make("retention", {}).weights()
    tensors = draw(gates, whole)
    path = folder / f"{gates.kind}.safetensors"
    save_weights(path, gates.kind, tensors, Base(name="random", config=whole.config), made={"how": "random"})
    return folder


@pytest.fixture(autouse=True)
def _none_left() -> Iterator[None]:
    yield
    end_all()


def line(model: Path, *words: str) -> str:
    return f"run --model {model} --budget 48 --interval 8 --limit {LIMIT} -q {' '.join(words)}"


def run(model: Path, *words: str, cwd: Path) -> Ended:
    return Command(line(model, *words), cwd=cwd).end()


def test_vneedle_runs_to_its_end_and_after_a_kill(model: Path, tmp_path: Path):
    methods = f"--method {','.join(METHODS)} --task vneedle/grid-3,vneedle/spread-4 --run-name"
    whole = run(model, methods, "whole", cwd=tmp_path)
    assert whole.code == 0, whole.err
    killed = Command(line(model, methods, "killed"), cwd=tmp_path, before=partial(watch, commit_seconds=0.0))
    for number, _ in enumerate(event for event in killed.events() if event.startswith("saved")):
        if number == 4:
            break
    assert killed.kill().code == -signal.SIGKILL
    resumed = Command("run --resume killed -q", cwd=tmp_path).end()
    assert resumed.code == 0, resumed.err
    results = tmp_path / "results"
    assert differences(results / "whole", results / "killed") == []
    rows = read_run(results / "whole").rows
    assert len(rows) == len(METHODS) * 2 * LIMIT
    assert set(rows["status"]) == {"ok"}
    assert set(rows["method"]) == set(METHODS)
    assert rows["score_partial"].between(0, 1).all()
    evicting = rows[rows["method"] != "full"]
    assert (evicting["entries_after_evict"].dropna() <= 48).all()
    shown = Command("show whole --sample spread-4-0 --html q.html", cwd=tmp_path).end()
    assert shown.code == 0, shown.err
    assert "[image 1]<|image_pad|>" in shown.out
    page = (tmp_path / "q.html").read_text()
    assert page.count("<article>") == len(METHODS)
    assert page.count('src="data:image/jpeg;base64,') == 4  # one in the prompt, three in later turns
    modes = rows.groupby("task")["multi_turn_cache"].unique().map(list).to_dict()
    assert modes == {"vneedle/grid-3": ["keep"], "vneedle/spread-4": ["reset (images)"]}


@pytest.mark.parametrize("family", sorted(vision.SQUARES))
def test_vneedle_runs_on_models_whose_images_are_squares(family: str, tmp_path: Path):
    folder = vision.repository(tmp_path / "m", family)
    words = "--method full,gkv --task vneedle/grid-3,vneedle/spread-4 --run-name r"
    ended = run(folder, words, cwd=tmp_path)
    assert ended.code == 0, ended.err
    rows = read_run(tmp_path / "results" / "r").rows
    assert set(rows["status"]) == {"ok"}
    assert (rows["image_tokens"] > 0).all()
    evicting = rows[rows["method"] == "gkv"]
    assert (evicting["evictions"] > 0).all()
    assert (evicting["kept_images"] < 1).all()


def test_a_picture_that_changed_between_kill_and_resume_is_refused(model: Path, tmp_path: Path):
    data = tmp_path / "data" / "mathvista"
    (data / "images").mkdir(parents=True)
    about = {"task": "t"}
    rows = [
        {"id": str(n), "question": "How many?", "image": f"images/{n}.png", "answer": "3", "answer_type": "integer"}
        | {"choices": None, "unit": None, "precision": None, "question_type": "free_form", "metadata": about}
        for n in range(LIMIT)
    ]
    (data / "testmini.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for n in range(LIMIT):
        (data / "images" / f"{n}.png").write_bytes(vision.picture(seed=n).data)
    words = "--method full,gkv --task mathvista --max-new-tokens 16 --data data --allow-data-mismatch --run-name r"
    started = Command(line(model, words), cwd=tmp_path, before=partial(watch, commit_seconds=0.0))
    started.wait_for("saved")
    assert started.kill().code == -signal.SIGKILL
    (data / "images" / "1.png").write_bytes(vision.picture(seed=9).data)
    changed = Command("run --resume r -q", cwd=tmp_path).end()
    assert changed.code == 2, changed.err
    assert "the data of task 'mathvista' changed since run 'r' began (sha256" in changed.err
    (data / "images" / "1.png").write_bytes(vision.picture(seed=1).data)
    again = Command("run --resume r -q", cwd=tmp_path).end()
    assert again.code == 0, again.err
    (data / "images" / "0.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    broken = run(model, words.replace("name r", "name b"), cwd=tmp_path)
    assert broken.code == 2, broken.err
    assert "image 'images/0.png'" in broken.err


def test_dialogues_are_stored_and_judged_later(model: Path, tmp_path: Path, serve):
    pictures = [vision.picture(seed=n).data for n in range(2)]
    folder = tmp_path / "data" / "mmdu"
    (folder / "mmdu_pics").mkdir(parents=True)
    for n, data in enumerate(pictures):
        (folder / "mmdu_pics" / f"{n}.png").write_bytes(data)
    said = ["One: <ImageHere>. Two: <ImageHere>. Compare.", "They differ.", "And now?", "They still do."]
    talk = [{"from": who, "value": text} for who, text in zip(("user", "assistant") * 2, said)]
    row = {"id": "d", "image": ["/mmdu_pics/0.png", "/mmdu_pics/1.png"], "conversations": talk}
    (folder / "benchmark.json").write_text(json.dumps([row]))
    words = "--method gkv --task mmdu --max-new-tokens 16 --data data --allow-data-mismatch --judge none --run-name d"
    stored = run(model, words, cwd=tmp_path)
    assert stored.code == 0, stored.err
    server = serve(say(str(dict.fromkeys(DIMENSIONS, 6))))
    judge = f"--judge {server.url} --judge-model judge-1 --judge-key-env JUDGE_KEY"
    scored = Command(f"score d {judge}", cwd=tmp_path, env={"JUDGE_KEY": KEY}).end()
    assert scored.code == 0, scored.err
    rows = read_run(tmp_path / "results" / "d").rows
    assert rows["score"].tolist() == [0.6]
    assert len(server.got) == 2
    for got in server.got:
        shown = [part["image_url"]["url"].partition(";base64,")[2] for part in got.user[1:]]
        assert [base64.b64decode(picture) for picture in shown] == pictures
