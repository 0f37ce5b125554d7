"""Weights of methods: written with a card, found beside the model, and refused when they belong to another."""

from __future__ import annotations

import json

import pytest
import torch
from support.models import build
from transformers import AutoConfig, LlamaConfig

from kvbench import tiny
from kvbench.engine.model.weights import Base, card_path, config_hash, load_weights, model_fields, save_weights
from kvbench.errors import SetupError
from kvbench.eviction.api import Weights

HEADKV, DUO = Weights(kind="headkv"), Weights(kind="duo", recipe="duo")


def config(**changes):
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    return LlamaConfig(**(sizes | {"vocab_size": 160} | changes))


@pytest.fixture
def folder(tmp_path):
    table = torch.arange(12.0).view(3, 4)
    save_weights(
        tmp_path / "headkv.safetensors", "headkv", {"importance": table}, Base(name="m", config=config()), made={}
    )
    return tmp_path


def test_what_was_written_is_read(folder):
    [(name, tensor)] = load_weights(HEADKV, folder, config(), "cpu").items()
    assert name == "importance"
    assert torch.equal(tensor, torch.arange(12.0).view(3, 4))
    for path in (str(folder / "headkv.safetensors"), str(folder)):
        assert torch.equal(load_weights(Weights(kind="headkv", path=path), None, config(), "cpu")[name], tensor)


def test_the_card_says_what_it_is(tmp_path):
    path = tmp_path / "duo.safetensors"
    card = save_weights(
        path,
        "duo",
        {"alpha": torch.ones(3, 2)},
        Base(name="org/m", config=config()),
        made={"how": "estimated", "seed": 3},
    )
    assert card == json.loads(card_path(path).read_text())
    assert (card["kind"], card["base_model"], card["shapes"]) == ("duo", "org/m", {"alpha": [3, 2]})
    assert card["made"] == {"how": "estimated", "seed": 3}
    assert card["config_sha256"] == config_hash(config())


def test_half_precision_comes_back_in_float32(tmp_path):
    path = tmp_path / "duo.safetensors"
    save_weights(path, "duo", {"alpha": torch.ones(3, 2).bfloat16()}, Base(name="m", config=config()), made={})
    assert load_weights(DUO, tmp_path, config(), "cpu")["alpha"].dtype == torch.float32


def test_a_configuration_is_the_same_as_object_and_as_file():
    object_ = AutoConfig.from_pretrained(tiny.path())
    file = json.loads((tiny.path() / "config.json").read_text())
    assert model_fields(object_) == model_fields(file)
    assert config_hash({"text_config": file, "model_type": "wrapper"}) == config_hash(object_)
    plain = {"model_type": "x", "num_attention_heads": 4, "hidden_size": 64}
    assert model_fields(plain)["num_key_value_heads"] == 4
    assert model_fields(plain)["head_dim"] == 16


@pytest.mark.parametrize("change", [{"hidden_size": 32}, {"vocab_size": 99}, {"num_key_value_heads": 1}])
def test_the_hash_follows_what_matters(change):
    assert config_hash(config()) != config_hash(config(**change))
    assert config_hash(config()) == config_hash(config(max_position_embeddings=9, rms_norm_eps=1e-3))


def refused(match, *arguments):
    with pytest.raises(SetupError, match=match) as error:
        load_weights(*arguments, "cpu")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_missing_weights_name_the_command_that_makes_them(tmp_path, folder):
    text = refused("'duo' are missing", DUO, folder, {"_name_or_path": "org/m", "model_type": "llama"})
    assert "'kvbench train duo --model org/m --out DIR' makes them." in text
    assert str(folder / "duo.safetensors") in text
    refused("there is no duo.safetensors beside 'MODEL'", DUO, None, {})
    refused("nowhere", Weights(kind="duo", path=str(tmp_path / "nowhere"), recipe="duo"), folder, config())
    assert "kvbench train" not in refused("'gates' are missing", Weights(kind="gates"), folder, config())


def test_weights_of_another_model_are_refused(folder):
    refused("another model, 'm': its num_hidden_layers is '3', here it is '5'", HEADKV, folder,
            config(num_hidden_layers=5))  # fmt: skip
    refused("its vocab_size is '160', here it is '99'", HEADKV, folder, config(vocab_size=99))


def rewrite(folder, **changes):
    path = folder / "headkv.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_card_that_does_not_fit_its_file_is_refused(folder):
    card = json.loads((folder / "headkv.json").read_text())
    for changes, match in (
        ({"kind": "duo"}, "kind 'duo'"),
        ({"sha256": "0"}, "do not belong to the card"),
        ({"config_sha256": "0"}, "configuration hash"),
        ({"shapes": {"importance": [4, 3]}}, "have shapes"),
        ({"model": None}, "names no model"),
        ({"format": "other"}, "no card of format"),
    ):
        rewrite(folder, **changes)
        refused(match, HEADKV, folder, config())
        rewrite(folder, **card)
    load_weights(HEADKV, folder, config(), "cpu")


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({"importance": torch.ones(3, 2)}, "have shapes"),
        ({"other": torch.ones(3, 4)}, "have shapes"),
        ({"importance": torch.full((3, 4), torch.nan)}, "not finite"),
    ],
)
def test_a_table_must_be_one_of_this_model_s_heads(tmp_path, tensors, match):
    save_weights(tmp_path / "headkv.safetensors", "headkv", tensors, Base(name="m", config=config()), made={})
    refused(match, HEADKV, tmp_path, config())


def test_damaged_files_are_refused(folder):
    path = folder / "headkv.safetensors"
    whole = path.read_bytes()
    for data, why in (
        (b"", "0 bytes (header too small)"),
        (b"\0" * 30, "30 bytes (invalid JSON in header)"),
        (whole[:-4], f"{len(whole) - 4} bytes (incomplete metadata, file not fully covered)"),
    ):
        path.write_bytes(data)
        text = f"weights '{path}' are no safetensors file, or a damaged one of {why}. Make or copy them again."
        assert refused("safetensors", HEADKV, folder, config()) == text
    torch.save({"importance": torch.ones(3, 4)}, path)
    refused("are a pickle, which kvbench does not open", HEADKV, folder, config())
    (folder / "headkv.json").write_text("{")
    refused("card .* cannot be read", HEADKV, folder, config())
    (folder / "headkv.json").unlink()
    refused("have no card: there is no .*headkv.json", HEADKV, folder, config())


def test_a_folder_that_cannot_be_written_to(tmp_path):
    with pytest.raises(SetupError, match="cannot be written"):
        save_weights(tmp_path / "no" / "duo.safetensors", "duo", {}, Base(name="m", config=config()), made={})


def test_the_built_in_model_brings_its_tables():
    built_in = AutoConfig.from_pretrained(tiny.path())
    table = load_weights(HEADKV, tiny.path(), built_in, "cpu")["importance"]
    assert float(table.sum()) == pytest.approx(1)
    alpha = load_weights(DUO, tiny.path(), built_in, "cpu")["alpha"]
    assert bool(((alpha >= 0) & (alpha <= 1)).all())


def test_a_model_in_memory_is_a_model_too(folder):
    loaded = build("llama")
    load_weights(HEADKV, folder, loaded.model.config, loaded.device)
