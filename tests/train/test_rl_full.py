"""Reinforcement learning with the full cache, and the entropy in the log of `gkv-rl`."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.recipes import change, logits_at_once

from kvbench import tiny
from kvbench.cli.app import main
from kvbench.engine.model.load import load
from kvbench.errors import UserError
from kvbench.train.entry import LORA
from kvbench.train.loop import LOG
from kvbench.train.recipe import Settings
from kvbench.train.recipes.gkv_distill import DistillRecipe
from kvbench.train.recipes.gkv_rl import RLRecipe, entropies, log_probs
from kvbench.train.sparse_pass import Part
from kvbench.train.traces import built_in

MORE = {"method": "full", "budget": 64, "interval": 8, "slots": 32, "micro": 8, "recompute": "off"}
MORE |= {"precision": "float32", **LORA, "temperature": 2.0, "group": 2}


def recipe(**more) -> RLRecipe:
    loaded = load(str(tiny.path()), device="cpu")
    asked = [replace(q, max_new_tokens=20) for q in built_in(("chain",), 4, 0, loaded)]
    return RLRecipe(loaded, Settings(steps=4, lr=1e-4, warmup=1, batch=2, more=MORE | more), asked, asked[:2])


def test_the_full_cache_leaves_no_lifetimes_and_plain_masks() -> None:
    full, sparse = recipe(), recipe(method="gkv(window=4)")
    for made, tables in ((full, 0), (sparse, len(full.loaded.geometry))):
        answered = [r.answered for group in made.sample(0, slice(0, 2)) for r in group]
        assert len(Part(answered, made.loaded.device).tables(made.lifetimes)) == tables
    assert full.budget is None
    assert set(full.held_out()) == {"reward", "accuracy"}


def test_a_training_names_the_weights_of_the_method_that_evicts(tmp_path: Path) -> None:
    """Else a training could go on with other weights in the same file."""
    card = shutil.copy(tiny.path() / "trimkv.json", tmp_path)
    shutil.copy(tiny.path() / "trimkv.safetensors", tmp_path)
    made = recipe(method=f"trimkv(gates={tmp_path})")
    assert made.settings.more["method_sha256"] == json.loads(Path(card).read_text())["sha256"]
    assert made.settings.more["method"] == f"trimkv(gates={tmp_path})"
    assert "method_sha256" not in recipe(method="gkv(window=4)").settings.more


def test_entropy_is_that_of_the_predictions_of_all_answers() -> None:
    made = recipe(method="gkv(window=4)")
    answered = [r.answered for group in made.sample(0, slice(0, 2)) for r in group]
    with torch.no_grad():
        parts = [Part([a], made.loaded.device) for a in answered]
        logits = [logits_at_once(p, made.loaded.model, p.tables(made.lifetimes))[0] for p in parts]
    p = [(own / 2.0).softmax(-1) for own in logits]
    each = torch.cat([-(own * own.log()).nan_to_num().sum(-1) for own in p])
    assert len(each) == sum(len(a.answer) for a in answered)
    _, figures = made.loss(0, slice(0, 2))
    assert figures["entropy"] == pytest.approx((float(each.sum()), len(each)), rel=1e-3)


def test_entropy_of_known_distributions() -> None:
    logits = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [1000.0, 0.0, 0.0, 0.0]]])
    assert entropies(logits, 0.5)[0].tolist() == pytest.approx([torch.log(torch.tensor(4.0)).item(), 0.0])
    even = torch.zeros(1, 1, 4)
    sampled = -log_probs(even, torch.tensor([[2]]), 0.5)
    torch.testing.assert_close(entropies(even, 0.5), sampled)


def test_distillation_from_a_cache_that_evicts_nothing_is_refused() -> None:
    loaded = load(str(tiny.path()), device="cpu")
    with pytest.raises(UserError, match=r"^method 'full' evicts nothing, so gkv-distill has nothing to train\."):
        DistillRecipe.check(loaded, MORE | {"kl_temperature": 1.0})


def test_the_command_trains_with_the_full_cache(tmp_path: Path, capsys, monkeypatch) -> None:
    change(monkeypatch, "gkv-rl", held_out=1)
    command = [
        "train",
        "gkv-rl",
        "--opt",
        "method=full",
        "--samples",
        "4",
        "--steps",
        "1",
        "--batch",
        "1",
        "-q",
        "--opt",
        "group=2",
    ]
    assert main([*command, "--out", str(tmp_path), "--json"]) == 0
    card = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert card["made"]["settings"]["more"]["method"] == "full"
    rows = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    assert all(row["entropy"] > 0 for row in rows)
