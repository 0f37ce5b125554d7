"""The loop behind every learned method: schedule, kill -9 and resume, refusals, several processes' shares."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.folders import TESTS
from support.toy_recipe import CONFIG, SETTINGS, Line

from kvbench.engine.model.weights import Base, load_weights
from kvbench.errors import RunInUseError, SetupError, UserError
from kvbench.eviction.api import Weights
from kvbench.sources.model_files import CHECKPOINT
from kvbench.train import checkpoint
from kvbench.train.lock import LOCK
from kvbench.train.loop import HELD_OUT, LOG, rate, train


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / LOG).read_text().splitlines()]


def test_training_improves_and_leaves_weights_with_a_card(tmp_path: Path):
    recipe = Line(SETTINGS)
    done = train(recipe, tmp_path, base=Base(name="toy", config=CONFIG), command="kvbench train line")
    assert done.improved(recipe)
    assert done.after["loss"] < 0.5 * done.before["loss"]
    assert len(losses(tmp_path)) == 60
    card = json.loads(done.path.with_suffix(".json").read_text())
    assert card["made"]["settings"]["steps"] == 60
    assert card["made"]["held_out_after"] == done.after
    assert card["made"]["data"] == "made up"
    loaded = load_weights(Weights(kind="headkv", path=str(done.path)), None, CONFIG, "cpu")
    torch.testing.assert_close(loaded["importance"], recipe.importance.detach())


CHILD = """
import sys
from pathlib import Path
sys.path[:0] = {path!r}
from support.toy_recipe import CONFIG, SETTINGS, Line
from kvbench.engine.model.weights import Base
from kvbench.train.loop import train
train(Line(SETTINGS, slow=0.02), Path(sys.argv[1]), base=Base(name="toy", config=CONFIG), checkpoint_seconds=0.05)
"""


def lines(folder: Path) -> int:
    """The whole lines of a log that another process may be writing."""
    return (folder / LOG).read_bytes().count(b"\n") if (folder / LOG).exists() else 0


def test_after_kill_9_the_same_call_comes_to_the_same_losses(tmp_path: Path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for folder in (straight, killed):
        folder.mkdir()
    train(Line(SETTINGS), straight, base=Base(name="toy", config=CONFIG))
    source = CHILD.format(path=[str(TESTS)])
    kills = 0
    for _ in range(4):
        child = subprocess.Popen([sys.executable, "-c", source, str(killed)])
        before = lines(killed)
        while child.poll() is None and lines(killed) < before + 12:
            time.sleep(0.02)
        if child.poll() is None:
            os.kill(child.pid, signal.SIGKILL)
            kills += 1
        child.wait()
    train(Line(SETTINGS), killed, base=Base(name="toy", config=CONFIG))
    assert kills >= 2
    assert losses(killed) == losses(straight)
    assert (killed / "headkv.safetensors").read_bytes() == (straight / "headkv.safetensors").read_bytes()


@pytest.mark.parametrize("at_once", [1, 3, 4, 9])
def test_a_batch_in_parts_has_the_gradient_of_the_whole(tmp_path: Path, at_once):
    class Parts(Line):
        pass

    Parts.at_once = at_once
    for name, recipe in (("whole", Line(SETTINGS)), ("parts", Parts(SETTINGS))):
        (tmp_path / name).mkdir()
        train(recipe, tmp_path / name, base=Base(name="toy", config=CONFIG))
    rows = [
        [json.loads(row) for row in (tmp_path / name / LOG).read_text().splitlines()] for name in ("whole", "parts")
    ]
    for whole, parts in zip(*rows):
        assert parts["loss"] == pytest.approx(whole["loss"], rel=1e-4)
        assert parts["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-4)


def test_parameters_are_put_back_after_every_step(tmp_path: Path):
    class Bounded(Line):
        def after_step(self):
            with torch.no_grad():
                self.importance.clamp_(max=0.5)

    recipe = Bounded(SETTINGS)
    train(recipe, tmp_path, base=Base(name="toy", config=CONFIG))
    assert float(recipe.tensors()["importance"].max()) == 0.5


def test_a_finished_training_says_the_same_again(tmp_path: Path):
    once, again = (train(Line(SETTINGS), tmp_path, base=Base(name="toy", config=CONFIG)) for _ in range(2))
    assert again.after == once.after
    assert [json.loads(row)["step"] for row in (tmp_path / HELD_OUT).read_text().splitlines()] == [0, 60]
    assert len(losses(tmp_path)) == 60


def test_a_parameter_without_a_gradient_stays(tmp_path: Path):
    class Idle(Line):
        def __init__(self, settings):
            super().__init__(settings)
            self.idle = torch.ones(3, requires_grad=True)

        def parameters(self):
            return super().parameters() | {"idle": self.idle}

    recipe = Idle(SETTINGS)
    train(recipe, tmp_path, base=Base(name="toy", config=CONFIG))
    assert torch.equal(recipe.idle.detach(), torch.ones(3))


def test_two_trainings_at_once_in_a_folder_are_refused(tmp_path: Path):
    def on_step(step, figures):
        with pytest.raises(RunInUseError, match="is in use by another training"):
            train(Line(SETTINGS), tmp_path, base=Base(name="toy", config=CONFIG))

    train(Line(replace(SETTINGS, steps=2)), tmp_path, base=Base(name="toy", config=CONFIG), on_step=on_step)
    assert len(losses(tmp_path)) == 2
    assert not (tmp_path / LOCK).exists()


def test_another_training_in_the_folder_is_refused(tmp_path: Path):
    train(Line(SETTINGS), tmp_path, base=Base(name="toy", config=CONFIG))
    with pytest.raises(UserError, match=r"holds a training with other settings: lr 0.05, now 0.01; steps 60, now 70\."):
        train(Line(replace(SETTINGS, lr=0.01, steps=70)), tmp_path, base=Base(name="toy", config=CONFIG))
    other = Line(SETTINGS)
    other.name = "curve"
    with pytest.raises(UserError, match=r"other settings: recipe line, now curve\."):
        train(other, tmp_path, base=Base(name="toy", config=CONFIG))
    (tmp_path / CHECKPOINT).write_bytes(b"x" * 40)
    with pytest.raises(SetupError, match="cannot be used"):
        train(Line(SETTINGS), tmp_path, base=Base(name="toy", config=CONFIG))


def test_a_checkpoint_without_a_version_has_the_first(tmp_path: Path, monkeypatch):
    train(Line(SETTINGS), tmp_path, base=Base(name="toy", config=CONFIG))
    state_of = checkpoint.state_of
    monkeypatch.setattr(
        checkpoint, "state_of", lambda path: {k: v for k, v in state_of(path).items() if k != "recipe_version"}
    )
    train(Line(SETTINGS), tmp_path, base=Base(name="toy", config=CONFIG))
    newer = Line(SETTINGS)
    newer.version = 2
    with pytest.raises(UserError, match=r"other settings: recipe_version 1, now 2\."):
        train(newer, tmp_path, base=Base(name="toy", config=CONFIG))


def test_a_loss_that_is_no_number_stops_at_once(tmp_path: Path):
    class Broken(Line):
        def loss(self, step, share):
            value, figures = super().loss(step, share)
            return value * (float("nan") if step == 3 else 1), figures

    with pytest.raises(SetupError, match="the loss is nan at step 4"):
        train(Broken(SETTINGS), tmp_path, base=Base(name="toy", config=CONFIG))


def test_the_rate_rises_and_falls():
    rates = [rate(SETTINGS, step) for step in range(SETTINGS.steps)]
    assert rates[4] == pytest.approx(SETTINGS.lr)
    assert rates[:5] == sorted(rates[:5])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rate(SETTINGS, SETTINGS.steps) == pytest.approx(SETTINGS.lr * SETTINGS.floor)
