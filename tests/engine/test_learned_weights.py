"""Weights that only training makes: missing ones name the option, those of another model say how they differ."""

from __future__ import annotations

import shutil

import pytest
import torch

from kvbench import tiny
from kvbench.cli.app import main
from kvbench.engine.model.weights import Base, load_weights, save_weights
from kvbench.errors import SetupError, UserError
from kvbench.eviction.choose import make

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "vocab_size": 160,
    "head_dim": 16,
}


NAMES = ["trimkv", "retention", "foresightkv"]


@pytest.fixture
def folder(tmp_path):
    """Weights of three methods; each tensor holds one number, which says whose and which it is."""
    for worth, name in enumerate(NAMES):
        shapes = make(name, {}).weights().shapes(CONFIG)
        tensors = {key: torch.full(shape, 16.0 * worth + number) for number, (key, shape) in enumerate(shapes.items())}
        save_weights(tmp_path / f"{name}.safetensors", name, tensors, Base(name="m", config=CONFIG), made={})
    return tmp_path


def load(name, folder, options=None, **changes):
    return load_weights(make(name, options or {}).weights(), folder, CONFIG | changes, "cpu")


@pytest.mark.parametrize("name", NAMES)
def test_a_method_loads_its_own_weights_beside_the_model(name, folder):
    loaded = load(name, folder)
    shapes = make(name, {}).weights().shapes(CONFIG)
    assert {key: tuple(tensor.shape) for key, tensor in loaded.items()} == shapes
    first = 16.0 * NAMES.index(name)
    assert {key: tensor.unique().tolist() for key, tensor in loaded.items()} == {
        key: [first + number] for number, key in enumerate(shapes)
    }


@pytest.mark.parametrize(("name", "what", "option"), [("trimkv", "gate", "gates"), ("retention", "gate", "gates"),
                                                      ("foresightkv", "scorer", "scorer")])  # fmt: skip
def test_missing_weights_name_the_option(name, what, option, tmp_path):
    with pytest.raises(UserError) as error:
        load(name, tmp_path, _name_or_path="org/x")
    assert str(error.value) == (
        f"method '{name}' needs trained {what} weights; give --method-opt {name}.{option}=PATH, "
        f"which 'kvbench train {name} --model org/x --out DIR' makes. None is bundled for 'org/x'."
    )
    with pytest.raises(SetupError, match=r"nowhere.* does not exist"):
        load(name, None, {option: str(tmp_path / "nowhere")})


def test_a_run_without_weights_ends_before_any_work(capsys, tmp_path):
    copy = shutil.copytree(tiny.path(), tmp_path / "copy", ignore=shutil.ignore_patterns("*.py", "retention.*"))
    arguments = ["run", "--model", str(copy), "--method", "retention", "--budget", "48", "--task", "walk"]
    assert main([*arguments, "--limit", "1", "--out", str(tmp_path), "--quiet"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: method 'retention' needs trained gate weights; give --method-opt retention.gates=")
    assert error.endswith(f"None is bundled for '{copy}'.")


@pytest.mark.parametrize(("name", "what"), [("trimkv", "gate"), ("foresightkv", "scorer")])
def test_weights_of_another_model_say_for_how_many_heads_they_are(name, what, folder):
    for changes, sizes in (({"num_hidden_layers": 36}, "36 x 2"), ({"num_key_value_heads": 4}, "3 x 4")):
        with pytest.raises(SetupError, match=f"{what} weights .* are for 3 layers x 2 KV heads; the model has {sizes}"):
            load(name, folder, **changes)


def test_weights_must_fit_the_options(folder):
    for options, why in (
        ({"gate": "rg10"}, "the method has gate=rg10, these weights have rg"),
        ({"tie": "layers"}, "the method has tie=layers, these weights have none"),
    ):
        with pytest.raises(SetupError, match=f"gate weights .* do not fit: {why}"):
            load("trimkv", folder, options)


def test_a_file_whose_tensors_are_of_another_size_is_refused(tmp_path):
    tensors = {n: torch.ones(s) for n, s in make("trimkv", {}).weights().shapes(CONFIG | {"hidden_size": 32}).items()}
    save_weights(tmp_path / "trimkv.safetensors", "trimkv", tensors, Base(name="m", config=CONFIG), made={})
    with pytest.raises(SetupError, match=r"in.weight is \[3, 32, 32\]; this model needs \[3, 32, 64\]"):
        load("trimkv", tmp_path)
