"""Training an adapter instead of all weights: its gradient, the teacher, and the folder that is left."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace

import pytest
import torch
from support.recipes import change

from kvbench import tiny
from kvbench.cli.app import main
from kvbench.engine.model.load import load
from kvbench.engine.model.weights import Base
from kvbench.errors import SetupError, UserError
from kvbench.sources import adapters
from kvbench.train import logits
from kvbench.train.collection import Collection
from kvbench.train.entry import LORA
from kvbench.train.loop import train
from kvbench.train.recipe import Settings
from kvbench.train.recipes.gkv_distill import DistillRecipe
from kvbench.train.recipes.gkv_rl import RLRecipe
from kvbench.train.traces import built_in, collect

MORE = {"method": "gkv(window=4)", "budget": 32, "interval": 8, "slots": 32, "micro": 8, "recompute": "off"}
MORE |= {**LORA, "precision": "float32", "kl_temperature": 4.0, "temperature": 2.0, "group": 2}
RANK, ALPHA = 4, 32.0


def settings(**more):
    return Settings(steps=2, lr=1e-2, warmup=1, batch=2, more=MORE | more)


@pytest.fixture(scope="module")
def answers():
    loaded = load(str(tiny.path()), device="cpu")
    asked = [replace(q, max_new_tokens=40) for q in built_in(("chain",), 2, 0, loaded)]
    return collect(loaded, asked, Collection(wrong="keep"))


def recipe(answers, **more):
    loaded = load(str(tiny.path()), device="cpu", dtype=more.get("precision", "float32"))
    test = [replace(q, max_new_tokens=2) for q in built_in(("chain",), 1, 0, loaded)]
    return DistillRecipe(loaded, settings(**more), answers, test)


def predictions(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits.float()


def weights_of(model):
    """The weights by the names that they have in a model without an adapter."""
    named = {name.replace(".base_layer", ""): p for name, p in model.named_parameters() if ".lora_" not in name}
    return {name: p.detach().clone() for name, p in named.items()}


@pytest.mark.parametrize("recompute", ["on", "off"])
def test_the_gradient_is_that_of_the_whole_weights_through_the_adapter(answers, recompute, monkeypatch):
    """B begins with 0, so that the gradient of B is alpha / rank times that of W, times A^T; that of A is 0."""
    monkeypatch.setattr(logits, "PREDICTIONS", 20)  # the teacher's part of a block is computed in the backward pass
    whole, low = recipe(answers, recompute=recompute), recipe(answers, recompute=recompute, lora=RANK)
    losses = [made.loss(0, slice(0, 2))[0].item() for made in (whole, low)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    trained = low.parameters()
    assert len(trained) == 2 * sum(isinstance(m, torch.nn.Linear) for m in whole.loaded.model.model.modules())
    largest = 0.0
    for name, p in trained.items():
        if ".lora_A." in name:
            assert not p.grad.any()
            continue
        slope = whole.parameters()[name.replace("lora_B.default.", "")].grad
        wanted = ALPHA / RANK * slope @ trained[name.replace("lora_B", "lora_A")].detach().T
        torch.testing.assert_close(p.grad, wanted, rtol=1e-3, atol=1e-4)
        largest = max(largest, float(wanted.abs().max()))
    assert largest > 0.01


def test_only_the_adapter_changes_and_switched_off_the_model_is_the_original(answers, tmp_path):
    made, original = recipe(answers, lora=RANK), load(str(tiny.path()), device="cpu")
    ids, model, before = answers[0].ids, made.loaded.model, weights_of(made.loaded.model)
    assert torch.equal(predictions(model, ids), predictions(original.model, ids))
    done = train(made, tmp_path, base=Base(name="tiny", config=original.model.config))
    assert all(torch.equal(before[name], p) for name, p in weights_of(model).items())
    with made.teacher() as teacher:
        assert torch.equal(predictions(teacher, ids), predictions(original.model, ids))
    learned = predictions(model, ids)
    assert float((learned - predictions(original.model, ids)).abs().max()) > 0.1
    merged = load(str(tiny.path()), device="cpu", adapter=adapters.find(str(done.path)))
    torch.testing.assert_close(predictions(merged.model, ids), learned, rtol=1e-3, atol=1e-3)
    assert not any(m.training for m in model.modules())


def test_an_adapter_is_float32_beside_bfloat16_weights(answers):
    made = recipe(answers, lora=RANK, precision="bfloat16", lora_places="q_proj, down_proj")
    assert {p.dtype for p in made.parameters().values()} == {torch.float32}
    assert {p.dtype for p in weights_of(made.loaded.model).values()} == {torch.bfloat16}
    assert {name.split(".")[-4] for name in made.parameters()} == {"q_proj", "down_proj"}
    loss, _ = made.loss(0, slice(0, 2))
    assert loss.item() == pytest.approx(recipe(answers).loss(0, slice(0, 2))[0].item(), rel=0.1)
    assert all(p.grad is not None for p in made.parameters().values())


def test_the_seed_alone_decides_the_initial_numbers(answers):
    state = torch.random.get_rng_state()
    first, again = (recipe(answers, lora=RANK).parameters() for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_the_command_leaves_an_adapter_that_run_takes(tmp_path, capsys, monkeypatch):
    """The eviction method's gates come with it, because the merged model's parameters are not those of their card."""
    out = tmp_path / "t"
    change(monkeypatch, "gkv-distill", held_out=1)
    command = ["train", "gkv-distill", "--out", str(out), "--samples", "2", "--steps", "1", "--batch", "1", "-q"]
    command += ["--json", "--opt", "method=retention", "--opt", "budget=48", "--opt", "lora=2"]
    assert main([*command, "--lr", "0.1"]) == 0
    card = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert card["format"] == "kvbench-adapter/1"
    assert card["made"]["settings"]["more"]["lora"] == 2
    config = json.loads((out / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny"
    assert config["target_modules"] == sorted(config["target_modules"])
    assert {p.name for p in (out / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    texts = [(out / name).read_text() for name in ("adapter.json", "adapter/adapter_config.json", "retention.json")]
    assert str(tmp_path) not in "".join(texts)
    assert str(tiny.path()) not in "".join(texts)
    run = ["run", "--adapter", str(out / "adapter"), "--method", "retention", "--budget", "48", "--task", "chain"]
    run += ["--limit", "1", "--interval", "32", "--max-new-tokens", "8", "--out", str(tmp_path / "r"), "-q"]
    assert main([*run, "--method-opt", f"retention.gates={out}"]) == 0
    capsys.readouterr()
    assert main(["train", "gkv-rl", "--continue-from", str(out), "--out", str(tmp_path / "more"), "-q"]) == 2
    assert "gkv-rl does not continue from an adapter. Merge it with peft" in capsys.readouterr().err


def test_a_method_with_an_adapter_of_its_own_may_evict(answers):
    made = recipe(answers, method="lookaheadkv", lora=RANK)
    assert made.loss(0, slice(0, 2))[0].item() > 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"lora": -1}, r"--opt lora must be 0 or more; got -1\."),
        ({"lora_alpha": 0.0}, r"--opt lora_alpha must be above 0; got 0\."),
        ({"lora_places": "q_proj,head"}, r"lora_places must be all, or names from down_proj, .*v_proj; got 'head'\."),
        ({"method": "criticalkv"}, "method 'criticalkv' reads the weights of o_proj, which an adapter would change"),
    ],
)
def test_mistakes(more, message):
    loaded = load(str(tiny.path()), device="cpu")
    with pytest.raises(UserError, match=message):
        RLRecipe.check(loaded, MORE | {"lora": 2} | more)
    assert not hasattr(loaded.model.model.layers[0].self_attn.q_proj, "lora_A")


def test_a_missing_package_is_named(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "peft" else found(name, *a))
    with pytest.raises(SetupError, match=r"--opt lora needs peft: pip install 'kvbench\[adapters\]'\."):
        RLRecipe.check(load(str(tiny.path()), device="cpu"), MORE | {"lora": 2})
