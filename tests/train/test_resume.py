"""Every recipe, cut off in the middle on the built-in model, comes to the losses and weights of one that was not.

Up to the last bits: those of some matrix products depend on where tensors lie in memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.recipes import change, options_of

from kvbench import tiny
from kvbench.engine.model.weights import Base
from kvbench.train import prepare as recipes
from kvbench.train.catalogue import BUILT_IN
from kvbench.train.loop import HELD_OUT, LOG, OnStep, Trained, train

STEPS, CUT = 4, 3
# What makes a recipe small. The second stage of foresightkv goes on from the scorer that ships with the model.
SMALL: dict[str, dict[str, Any]] = {
    "lookaheadkv": {"rows": 4, "rank": 2},
    "trimkv": {"width": 16},
    "retention": {"width": 16},
    "foresightkv-grpo": {"group": 2},
    "gkv-rl": {"group": 4, "slots": 8},
}


class Cut(Exception):
    """In place of a kill."""


def run(name: str, out: Path, on_step: OnStep | None = None, **settings: Any) -> Trained:
    entry = BUILT_IN[name]
    ready = recipes.prepare(
        name,
        str(tiny.path()),
        data=None,
        samples=8,
        steps=STEPS,
        lr=entry.settings("tiny")["lr"],
        batch=2,
        seed=0,
        options=options_of(entry) | SMALL.get(name, {}) | settings,
        device="cpu",
        out=out,
    )

    config = ready.loaded.model.config
    return train(ready.recipe, out, base=Base(name="tiny", config=config), checkpoint_seconds=0.0, on_step=on_step)


def cut_off(step: int, figures: dict[str, float]) -> None:
    if step == CUT:
        raise Cut


def figures(out: Path, name: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


def weights(done: Trained) -> dict[str, torch.Tensor]:
    return load_file(done.path / "model.safetensors" if done.path.is_dir() else done.path)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_training_that_was_cut_off_comes_to_the_same_end(name, tmp_path, monkeypatch):
    change(monkeypatch, name, held_out=2)
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    for folder in (straight, cut):
        folder.mkdir()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in one order
    try:
        whole = run(name, straight)
        with pytest.raises(Cut):
            run(name, cut, cut_off)
        assert len(figures(cut, LOG)) == CUT
        again = run(name, cut)
    finally:
        torch.set_num_threads(threads)
    for name in (LOG, HELD_OUT):
        assert figures(cut, name) == [pytest.approx(row, rel=1e-4) for row in figures(straight, name)]
    torch.testing.assert_close(weights(again), weights(whole), rtol=1e-4, atol=1e-5)
