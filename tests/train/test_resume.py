"""Every recipe, cut off in the middle on the built-in model, comes to the losses and weights of one that was not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbench import tiny
from kvbench.train import recipes
from kvbench.train.catalogue import RECIPES
from kvbench.train.loop import HELD_OUT, LOG, Trained, train

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


def run(name: str, out: Path, stop: int | None = None) -> Trained:
    entry = RECIPES[name]
    ready = recipes.prepare(
        name,
        str(tiny.path()),
        data=None,
        samples=8,
        steps=STEPS,
        lr=entry.tiny_lr or entry.lr,
        batch=2,
        seed=0,
        options=dict(entry.options) | dict(entry.tiny) | SMALL.get(name, {}),
        device="cpu",
    )

    def tick(step: int, figures: dict[str, float]) -> None:
        if step == stop:
            raise Cut

    config = ready.loaded.model.config
    return train(ready.recipe, out, base_model="tiny", config=config, checkpoint_seconds=0.0, tick=tick)


def figures(out: Path, name: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


def weights(done: Trained) -> bytes:
    path = done.path / "model.safetensors" if done.path.is_dir() else done.path
    return path.read_bytes()


@pytest.mark.parametrize("name", RECIPES)
def test_a_training_that_was_cut_off_comes_to_the_same_end(name, tmp_path, monkeypatch):
    monkeypatch.setitem(RECIPES, name, replace(RECIPES[name], held_out=2))
    straight, cut = tmp_path / "straight", tmp_path / "cut"
    for folder in (straight, cut):
        folder.mkdir()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums in one order
    try:
        whole = run(name, straight)
        with pytest.raises(Cut):
            run(name, cut, stop=CUT)
        assert len(figures(cut, LOG)) == CUT
        again = run(name, cut)
    finally:
        torch.set_num_threads(threads)
    assert figures(cut, LOG) == figures(straight, LOG)
    assert figures(cut, HELD_OUT) == figures(straight, HELD_OUT)
    assert weights(again) == weights(whole)
