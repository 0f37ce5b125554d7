"""Held-out figures while a training runs; trainings that become longer, and those that begin with others' weights."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.recipes import change
from support.toy_recipe import CONFIG, SETTINGS, Line

from kvbench import tiny
from kvbench.cli.app import main
from kvbench.engine.model.weights import Base
from kvbench.errors import UserError
from kvbench.train.loop import HELD_OUT, LOG, train

CONSTANT = replace(SETTINGS, schedule="constant", steps=10)
BASE = Base(name="toy", config=CONFIG)


def rows(folder: Path, name: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def folders(place: Path, *names: str) -> list[Path]:
    for name in names:
        (place / name).mkdir()
    return [place / name for name in names]


def test_held_out_figures_every_n_steps_are_those_of_shorter_trainings(tmp_path: Path) -> None:
    every, short = folders(tmp_path, "every", "short")
    seen: dict[int, float] = {}
    on_step = lambda step, figures: seen.update({step: figures.get("held-out loss")})  # noqa: E731
    done = train(Line(CONSTANT), every, base=BASE, evaluate=4, on_step=on_step)
    lines = rows(every, HELD_OUT)
    assert [line["step"] for line in lines] == [0, 4, 8, 10]
    train(Line(replace(CONSTANT, steps=4)), short, base=BASE)
    assert lines[1] == rows(short, HELD_OUT)[-1]
    assert [seen[step] for step in (4, 5, 8, 9)] == [None, lines[1]["loss"], lines[1]["loss"], lines[2]["loss"]]
    assert (done.before["loss"], done.after["loss"]) == (lines[0]["loss"], lines[-1]["loss"])


@pytest.mark.parametrize("stop", [3, 4, 5, 9])
def test_a_resumed_training_writes_the_same_held_out_lines(stop: int, tmp_path: Path) -> None:
    whole, cut = folders(tmp_path, "whole", "cut")

    def on_step(step: int, figures: dict[str, float]) -> None:
        if step == stop:
            raise KeyboardInterrupt

    train(Line(CONSTANT), whole, base=BASE, evaluate=4)
    with pytest.raises(KeyboardInterrupt):
        train(Line(CONSTANT), cut, base=BASE, evaluate=4, checkpoint_seconds=0, on_step=on_step)
    train(Line(CONSTANT), cut, base=BASE, evaluate=4)
    for name in (HELD_OUT, LOG):
        assert rows(cut, name) == rows(whole, name)


def test_a_training_at_a_constant_rate_becomes_longer_in_its_folder(tmp_path: Path) -> None:
    whole, longer = folders(tmp_path, "whole", "longer")
    train(Line(replace(CONSTANT, steps=16)), whole, base=BASE, evaluate=8)
    train(Line(CONSTANT), longer, base=BASE, evaluate=8)
    done = train(Line(replace(CONSTANT, steps=16)), longer, base=BASE, evaluate=8)
    for name in (HELD_OUT, LOG):
        assert rows(longer, name) == rows(whole, name)
    assert (longer / "headkv.safetensors").read_bytes() == (whole / "headkv.safetensors").read_bytes()
    assert done.card["made"]["settings"]["steps"] == 16
    with pytest.raises(UserError, match=r"other settings: steps 16, now 12\."):
        train(Line(replace(CONSTANT, steps=12)), longer, base=BASE)


def test_a_training_whose_rates_depend_on_its_length_keeps_it(tmp_path: Path) -> None:
    cosine, flat = folders(tmp_path, "cosine", "flat")
    train(Line(replace(CONSTANT, schedule="cosine")), cosine, base=BASE)
    with pytest.raises(UserError, match=r"other settings: steps 10, now 16\..*, use --continue-from"):
        train(Line(replace(CONSTANT, schedule="cosine", steps=16)), cosine, base=BASE)
    flat_top = replace(CONSTANT, schedule="trapezoid", warmup=3)

    def on_step(step: int, figures: dict[str, float]) -> None:
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(Line(flat_top), flat, base=BASE, checkpoint_seconds=0, on_step=on_step)
    train(Line(replace(flat_top, steps=16)), flat, base=BASE)  # stopped before its rate fell
    assert len(rows(flat, LOG)) == 16


def test_weights_that_do_not_fit_are_refused() -> None:
    recipe = Line(SETTINGS)
    recipe.continue_from({"importance": torch.ones(2, 3)})
    assert torch.equal(recipe.importance.detach(), torch.ones(2, 3))
    with pytest.raises(UserError, match=r"do not fit .*: importance is \[2, 4\]; this model needs \[2, 3\]\. Give the"):
        recipe.continue_from({"importance": torch.ones(2, 4)})
    recipe.tensors = lambda: {"importance": torch.ones(2, 3), "scaling": torch.ones(1)}
    with pytest.raises(UserError, match="scaling has other values"):
        recipe.continue_from({"importance": torch.ones(2, 3), "scaling": torch.zeros(1)})


SMALL = {
    "lookaheadkv": ["rows=2", "rank=2", "max_tokens=16"],
    "duo": [],
    "foresightkv": ["hidden=4"],
}


@pytest.mark.parametrize("name", SMALL)
def test_a_finished_training_is_where_another_begins(name: str, tmp_path: Path, monkeypatch, capsys) -> None:
    change(monkeypatch, name, held_out=1)
    options = [word for text in SMALL[name] for word in ("--opt", text)]
    command = ["train", name, "--samples", "2", "--batch", "1", *options, "-q", "--json"]
    first, second = tmp_path / "first", tmp_path / "second"

    def card(*words: str) -> dict:
        assert main([*command, *words]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    begun = card("--out", str(first), "--steps", "2")
    further = card("--out", str(second), "--steps", "1", "--continue-from", str(first))
    before, after = (c["made"][f"held_out_{end}"] for c, end in ((further, "before"), (begun, "after")))
    assert before == pytest.approx(after, rel=2e-3, abs=1e-5)
    assert further["made"]["settings"]["more"]["continue_from_sha256"] == begun["sha256"]
    assert "--continue-from first" in further["made"]["command"]


def test_weights_of_another_model_are_refused_before_questions_are_asked(tmp_path: Path, capsys) -> None:
    first = tmp_path / "first"
    shutil.copytree(tiny.path(), first)
    card = first / "trimkv.json"
    card.write_text(json.dumps(json.loads(card.read_text()) | {"fingerprint": "0" * 64}))
    command = ["train", "trimkv", "--samples", "2", "--batch", "1", "--continue-from", str(first)]
    assert main([*command, "--out", str(tmp_path / "out")]) == 3
    assert "whose parameters differ from this model's" in capsys.readouterr().err
    assert not (tmp_path / "out" / "answers.jsonl").exists()


def test_trainings_of_models_and_estimates_say_how_they_go_on(tmp_path: Path, capsys) -> None:
    for name, message in [
        ("gkv-rl", "gkv-rl trains a model: to continue, give --model runs/a/model, not --continue-from."),
        ("headkv", "headkv is estimated, not trained; it takes no --continue-from."),
        ("trimkv", "weights 'trimkv' are missing: 'runs/a' does not exist. 'kvbench train trimkv"),
    ]:
        assert main(["train", name, "--continue-from", "runs/a", "--out", str(tmp_path)]) != 0
        assert message in capsys.readouterr().err
    assert main(["train", "trimkv", "--evaluate", "0", "--out", str(tmp_path)]) == 2
    assert "--evaluate must be" in capsys.readouterr().err
