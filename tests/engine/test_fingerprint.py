"""What tells models of equal sizes apart, and that weights of one are not used with another."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import torch
from support.models import build

from kvbench import tiny
from kvbench.cli.app import main
from kvbench.engine.model.fingerprint import fingerprint
from kvbench.engine.model.load import load
from kvbench.engine.model.weights import Base, card_path, load_weights, save_weights
from kvbench.errors import SetupError
from kvbench.eviction.api import Weights
from kvbench.store import read_rows

HEADKV = Weights(kind="headkv")


def test_number_types_and_names_do_not_matter():
    model = build("qwen3").model
    assert fingerprint(model) == fingerprint(copy.deepcopy(model).bfloat16()) == fingerprint(torch.nn.Sequential(model))
    assert fingerprint(copy.deepcopy(model).half()) is None  # float16 rounds small numbers otherwise
    stored = load(str(tiny.path()), device="cpu", dtype="bfloat16")
    assert stored.fingerprint == load(str(tiny.path()), device="cpu").fingerprint == fingerprint(stored.model)


class Wrapped(torch.Tensor):
    """As packages for quantisation have them."""


@pytest.mark.parametrize(
    "change",
    [
        lambda p: torch.nn.Parameter(p.data.to("meta")),
        lambda p: torch.nn.Parameter(p.data.as_subclass(Wrapped)),
        lambda p: torch.nn.Parameter(p.data.to(torch.int8), requires_grad=False),
    ],
)
def test_of_offloaded_and_quantised_models_nothing_is_said(change):
    model = build("qwen3").model
    model.lm_head.weight = change(model.lm_head.weight)
    assert fingerprint(model) is None


def test_other_parameters_are_noticed():
    model = build("qwen3").model
    before = fingerprint(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    assert fingerprint(model) != before


def test_weights_of_another_model_of_equal_sizes_are_refused(tmp_path):
    loaded = build("llama")
    config = loaded.model.config
    shape = config.num_hidden_layers, config.num_attention_heads
    path = tmp_path / "headkv.safetensors"
    base = Base(name="org/theirs", config=config, fingerprint="0" * 64)
    save_weights(path, "headkv", {"importance": torch.ones(shape)}, base, made={})
    with pytest.raises(SetupError, match=r"made for 'org/theirs', whose parameters differ"):
        load_weights(HEADKV, tmp_path, config, "cpu", loaded.fingerprint)
    load_weights(HEADKV, tmp_path, config, "cpu")  # before the model is loaded nobody knows
    card = json.loads(card_path(path).read_text())
    card_path(path).write_text(json.dumps(card | {"fingerprint": None}))
    load_weights(HEADKV, tmp_path, config, "cpu", loaded.fingerprint)


@pytest.mark.parametrize(
    "kind", ["trimkv", "retention", "foresightkv", "lookaheadkv", "duo", "headkv", "kvzap", "locret", "triattention"]
)
def test_the_built_in_model_s_weights_are_its_own(kind):
    assert json.loads((tiny.path() / f"{kind}.json").read_text())["fingerprint"] == load(str(tiny.path())).fingerprint


@pytest.fixture
def moved(tmp_path):
    """A model that was trained further, in a folder with the gates of the one it comes from."""
    loaded = load(str(tiny.path()), device="cpu")
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(1.01)
    loaded.model.save_pretrained(tmp_path / "m")
    loaded.tokenizer.save_pretrained(tmp_path / "m")
    for name in ("trimkv.safetensors", "trimkv.json"):
        shutil.copy(tiny.path() / name, tmp_path / "m")
    return str(tmp_path / "m")


def test_a_run_is_refused_before_its_first_row(moved, tmp_path, capsys):
    run = ["run", "--model", moved, "--method", "gkv,trimkv", "--budget", "48", "--task", "walk", "--limit", "1", "-q"]
    assert main([*run, "--out", str(tmp_path), "--run-name", "r"]) == 3
    *warnings, line = capsys.readouterr().err.strip().splitlines()
    assert all("budget" in warning for warning in warnings)  # the card's budget is another
    assert "were made for 'tiny', whose parameters differ from this model's" in line
    assert not read_rows(tmp_path / "r").size


def test_replay_leaves_such_methods_out(moved, capsys):
    command = ["replay", "--model", moved, "--method", "all", "--budget", "48", "--task", "walk", "--limit", "1"]
    assert main([*command, "--interval", "64", "-q", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    left_out = {entry["method"]: entry["reason"] for entry in found["left_out"]}
    assert "whose parameters differ" in left_out["trimkv"]
    assert "gkv" in {row["method"] for row in found["rows"]}
