"""What tells models of equal sizes apart, and that weights of one are not used with another."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import torch
from support.models import build

from kvbench import tiny
from kvbench.cli import main
from kvbench.engine.fingerprint import fingerprint
from kvbench.engine.model import load
from kvbench.engine.weights import Base, card_path, load_weights, save_weights
from kvbench.errors import SetupError
from kvbench.eviction.api import Weights

HEADKV = Weights(kind="headkv")


def test_number_types_and_names_do_not_matter():
    model = build("qwen3").model
    assert fingerprint(model) == fingerprint(copy.deepcopy(model).bfloat16()) == fingerprint(torch.nn.Sequential(model))
    assert fingerprint(copy.deepcopy(model).half()) is None  # float16 rounds small numbers otherwise
    stored = load(str(tiny.path()), device="cpu", dtype="bfloat16")
    assert stored.fingerprint == load(str(tiny.path()), device="cpu").fingerprint == fingerprint(stored.model)


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
    with pytest.raises(SetupError, match=r"another model of the same sizes, 'org/theirs'\. .* remove 'fingerprint'"):
        load_weights(HEADKV, tmp_path, config, "cpu", loaded.fingerprint)
    load_weights(HEADKV, tmp_path, config, "cpu")  # before the model is loaded nobody knows
    card = json.loads(card_path(path).read_text())
    card_path(path).write_text(json.dumps(card | {"fingerprint": None}))
    load_weights(HEADKV, tmp_path, config, "cpu", loaded.fingerprint)


@pytest.mark.parametrize("kind", ["trimkv", "retention", "foresightkv", "lookaheadkv", "duo", "headkv"])
def test_the_built_in_model_s_weights_are_its_own(kind):
    assert json.loads((tiny.path() / f"{kind}.json").read_text())["fingerprint"] == load(str(tiny.path())).fingerprint


def test_a_run_says_so(tmp_path, capsys):
    """A model that was trained further, in a folder with the gates of the one it comes from."""
    loaded = load(str(tiny.path()), device="cpu")
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(1.01)
    loaded.model.save_pretrained(tmp_path / "m")
    loaded.tokenizer.save_pretrained(tmp_path / "m")
    for name in ("trimkv.safetensors", "trimkv.json"):
        shutil.copy(tiny.path() / name, tmp_path / "m")
    run = ["run", "--model", str(tmp_path / "m"), "--method", "trimkv", "--budget", "48", "--task", "walk"]
    assert main([*run, "--limit", "1", "--out", str(tmp_path / "out"), "-q"]) == 3
    [line] = capsys.readouterr().err.strip().splitlines()
    assert "were made for another model of the same sizes, 'tiny'" in line
