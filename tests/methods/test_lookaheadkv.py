"""lookaheadkv against one plain pass over prompt and learned rows, the adapter masked to those rows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import transformers
from kvbench.methods.lookaheadkv import LookaheadKV
from support.models import BASE, Words, build, requests
from support.zoo import configuration

from kvbench.engine.adapter import adapted, projections
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import prepare
from kvbench.engine.model.weights import Base, save_weights
from kvbench.engine.probes import check_probes
from kvbench.errors import SetupError, UserError
from kvbench.eviction.choose import make
from kvbench.records import Sampling
from kvbench.train.recipes.lookaheadkv import LookaheadRecipe

ROWS, RANK, BUDGET = 5, 3, 16
SEVEN = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def made(model, seed: int = 0, scale: float = 0.5) -> dict[str, torch.Tensor]:
    """Weights of all seven projections that change a lot."""
    generator = torch.Generator().manual_seed(seed)
    hidden = model.config.hidden_size
    found = {"embeddings": torch.randn(ROWS, hidden, generator=generator), "scaling": torch.tensor([2.0])}
    for name, linear in projections(model).items():
        found[f"A.{name}"] = scale * torch.randn(RANK, linear.in_features, generator=generator)
        found[f"B.{name}"] = scale * torch.randn(linear.out_features, RANK, generator=generator)
    return found


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def loaded(request, tmp_path_factory):
    loaded = build(request.param)
    folder = tmp_path_factory.mktemp("weights")
    weights = made(loaded.model)
    save_weights(
        folder / "lookaheadkv.safetensors", "lookaheadkv", weights, Base(name="r", config=loaded.model.config), made={}
    )
    return dataclasses.replace(loaded, folder=folder), weights


def prompt(length: int = 60, new_tokens: int = 12):
    (request,) = requests(lengths=(length,), new_tokens=(new_tokens,), samples=1, sampling=Sampling())
    return request


def run(loaded, method, budget, log=None):
    engine = Engine(loaded, method, budget=budget, interval=8, slots=1, max_tokens=200, log=log)
    (done,) = engine.generate([prompt()])
    return done


def plain_scores(loaded, weights) -> list[torch.Tensor]:
    """Per layer the mean attention [Hk, T] of the learned rows, from transformers' eager attention in one pass."""
    model, ids = loaded.model, torch.tensor([prompt().prompt_ids])
    prompt_len = ids.shape[1]
    rows = torch.cat([model.get_input_embeddings()(ids), weights["embeddings"][None]], dim=1)
    hooks = []
    for name, linear in projections(model).items():
        a, b = weights[f"A.{name}"], weights[f"B.{name}"]

        def add(module, inputs, output, a=a, b=b):
            low = inputs[0] @ a.T @ b.T * 2.0
            low[:, :prompt_len] = 0
            return output + low

        hooks.append(linear.register_forward_hook(add))
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            out = model(inputs_embeds=rows, output_attentions=True, use_cache=False)
    finally:
        model.set_attn_implementation(before)
        for hook in hooks:
            hook.remove()
    heads = model.config.num_key_value_heads
    return [
        attention[0, :, prompt_len:, :prompt_len].mean(dim=1).unflatten(0, (heads, -1)).mean(dim=1)
        for attention in out.attentions
    ]


def test_what_stays_is_what_the_learned_rows_attend_to(loaded):
    model, weights = loaded
    events = []
    run(model, LookaheadKV(), BUDGET, log=lambda *event: events.append(event))
    kept = {layer: heads for _, seen, layer, heads in events if seen == 60}
    wanted = plain_scores(model, weights)
    assert set(kept) == set(range(len(wanted)))
    for layer, scores in enumerate(wanted):
        for head, positions in enumerate(kept[layer]):
            assert sorted(map(int, positions)) == sorted(scores[head].topk(BUDGET).indices.tolist())


def test_the_adapter_matters_and_leaves_no_trace(loaded):
    model, _ = loaded
    full = run(model, LookaheadKV(), 60)
    again = run(model, LookaheadKV(), 60)
    assert full.token_ids == again.token_ids
    plain = torch.tensor([[*prompt().prompt_ids]])
    with torch.inference_mode():
        before = model.model(plain).logits
        run(model, LookaheadKV(), BUDGET)
        assert torch.equal(model.model(plain).logits, before)  # to the bit: no hook is left
    from kvbench import registry

    engine = Engine(model, registry.methods.get("full")(), budget=None, interval=8, slots=1, max_tokens=200)
    (unevicted,) = engine.generate([prompt()])
    assert full.token_ids == unevicted.token_ids  # prompt keys and values are the plain model's


def test_the_adapter_is_added_inside_the_block_only():
    model = build("qwen3").model
    weights = made(model)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.inference_mode():
        before = model(ids).logits
        with adapted(model, weights):
            assert not torch.allclose(model(ids).logits, before)
        assert torch.equal(model(ids).logits, before)
        silent = {name: torch.zeros_like(t) if name.startswith("B.") else t for name, t in weights.items()}
        with adapted(model, silent):
            assert torch.equal(model(ids).logits, before)
    assert {name.split(".")[1] for name in projections(model)} == SEVEN


def test_a_layer_with_two_linear_layers_of_one_name_has_both():
    """AFMoE's attention has a gate_proj beside that of its feed-forward part, to which the short name belongs."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(configuration("afmoe", {}))
    found, layer = projections(model), model.model.layers[0]
    assert found["0.gate_proj"] is layer.mlp.gate_proj
    assert found["0.self_attn.gate_proj"] is layer.self_attn.gate_proj


@pytest.mark.parametrize("kind", ["opt", "gpt2"])
def test_a_probe_behind_the_last_position_fails_the_row(kind):
    """Positions of these models are rows of a table, of 64 here. laq reads eight probes of a token each."""
    config = configuration(kind, {"max_position_embeddings": 64})
    torch.manual_seed(0)
    model = prepare(transformers.AutoModelForCausalLM.from_config(config).eval(), Words())
    engine = Engine(model, make("laq", {"n": 8}), budget=40, interval=8, slots=1, max_tokens=64)
    asked = requests(lengths=(60, 50), new_tokens=(4, 4), samples=1)
    found = [(answer.status, answer.note) for answer in engine.generate(asked)]
    note = "60 prompt tokens + 5 tokens of a probe in a context of 64"
    assert found == [("prompt_too_long", note), ("ok", "")]


def test_embeddings_of_every_layer_are_refused():
    config = transformers.Gemma4TextConfig(**BASE, hidden_size_per_layer_input=8)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    message = "do not suit model type 'gemma4_text': every layer reads its own embeddings of tokens"
    with pytest.raises(UserError, match=message):
        check_probes(LookaheadKV(), config)
    with pytest.raises(UserError, match=message):
        LookaheadRecipe.check(dataclasses.replace(build("llama"), model=model), {"places": "none"})
    check_probes(make("laq", {}), config)
    check_probes(LookaheadKV(), build("llama").model.config)


def test_an_adapter_of_another_model_is_refused():
    model = build("qwen3").model
    weights = made(model)
    with (
        pytest.raises(SetupError, match=r"'99.q_proj', which this model does not have"),
        adapted(
            model,
            {"A.99.q_proj": weights["A.0.q_proj"], "B.99.q_proj": weights["B.0.q_proj"], "scaling": torch.ones(1)},
        ),
    ):
        pass
    wide = {**weights, "A.0.q_proj": torch.zeros(RANK, 7)}
    with pytest.raises(SetupError, match=r"the method's adapter of layer '0\.q_proj' maps 7"), adapted(model, wide):
        pass


def test_a_file_that_does_not_fit_is_refused(loaded, tmp_path: Path):
    model, weights = loaded
    path = tmp_path / "lookaheadkv.safetensors"
    broken = {name: t for name, t in weights.items() if name != "B.0.q_proj"}
    save_weights(path, "lookaheadkv", broken, Base(name="r", config=model.model.config), made={})
    with pytest.raises(SetupError, match=r"the adapter of 0.q_proj lacks one of its two matrices"):
        run(model, LookaheadKV(lookahead=str(path)), BUDGET)
