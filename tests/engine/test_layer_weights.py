"""Matrices of the model that methods read: the right ones, for every entry, or a refusal in one line."""

from __future__ import annotations

import sys

import pytest
import torch
import transformers
from support.models import build, requests

from kvbench.audit.invariants.watch import watching
from kvbench.engine.cache.layout import fit
from kvbench.engine.loop import Engine
from kvbench.engine.model.layer_weights import layer_weights, refuse_quantised
from kvbench.engine.model.load import prepare
from kvbench.errors import UserError
from kvbench.eviction import noise
from kvbench.eviction.choose import make
from kvbench.eviction.new_tokens import NewTokens
from kvbench.eviction.terms import value_norm
from kvbench.eviction.terms.value_norm import projected_norms
from kvbench.integrations.transformers_cache import EvictionCache

METHOD = {"base": "snapkv-decode(window=4)"}
O_PROJ = ("o_proj",)


def gpt2():
    config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=32, vocab_size=64, n_positions=64)
    return prepare(transformers.AutoModelForCausalLM.from_config(config).eval(), None)


@pytest.mark.parametrize(
    ("make_model", "projection"),
    [
        (lambda: build("qwen3"), lambda m: m.model.layers[1].self_attn.o_proj),
        (lambda: build("phi"), lambda m: m.model.layers[1].self_attn.dense),
        (gpt2, lambda m: m.transformer.h[1].attn.c_proj),
    ],
    ids=["qwen3", "phi", "gpt2"],
)
def test_the_parts_of_all_heads_add_up_to_the_projection(make_model, projection):
    loaded = make_model()
    matrix = layer_weights(loaded.model, loaded.geometry, O_PROJ)[1]["o_proj"]
    layer, heads = projection(loaded.model), loaded.geometry[1].query_heads
    out = torch.randn(5, heads, matrix.shape[1], generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = layer(out.flatten(1)) - (0 if layer.bias is None else layer.bias)
    torch.testing.assert_close(torch.einsum("thd,hdm->tm", out, matrix), whole)
    assert matrix.untyped_storage().data_ptr() == layer.weight.untyped_storage().data_ptr()  # no copy


def test_layers_with_a_sliding_window_are_left_out():
    loaded = build("gemma3")
    evicted = [g.index for g in loaded.geometry if g.evicts]
    assert list(layer_weights(loaded.model, loaded.geometry, O_PROJ)) == evicted
    assert layer_weights(loaded.model, loaded.geometry, ()) == {}


def norms(loaded, ids):
    """The norms [Hk, T] of every layer, from one plain forward pass of transformers."""
    inputs, layers = [], loaded.model.model.layers
    hooks = [
        layer.self_attn.register_forward_pre_hook(lambda _, a, k: inputs.append(k["hidden_states"]), with_kwargs=True)
        for layer in layers
    ]
    try:
        with torch.no_grad():
            loaded.model(torch.tensor([ids]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    found, matrices = [], layer_weights(loaded.model, loaded.geometry, O_PROJ)
    for g, x, layer in zip(loaded.geometry, inputs, layers):
        values = layer.self_attn.v_proj(x).unflatten(-1, (g.kv_heads, -1)).transpose(1, 2)
        new = NewTokens(layer=g.index, hidden=x, keys=values, values=values, layer_weights=matrices[g.index])
        found.append(projected_norms(new)[0])
    return found


@pytest.mark.parametrize("layout", ["dense", "paged"])
def test_every_entry_has_the_norm_of_its_own_value(layout):
    """Until the first eviction while decoding the cache is the full one."""
    loaded, method = build("qwen3"), make("criticalkv", METHOD)
    todo = requests((31, 34), (30, 30), 1)
    engine = Engine(loaded, method, budget=40, interval=16, slots=2, max_tokens=80, layout=layout)
    with watching(method) as seen, torch.no_grad():
        done = {g.request.doc_id: g for g in engine.generate(todo)}
        owners = {noise.signed64(request.noise_key(0)): request for request in todo}
        first = [view for _, [view] in seen.decisions if not int(view.eviction_index.max())]
        for view in first:
            for row, key in enumerate(view.noise_key.tolist()):
                ids = [*owners[key].prompt_ids, *done[owners[key].doc_id].token_ids][: int(view.seen[row])]
                layer = view.layer if not hasattr(view, "layers") else int(view.layers[row])
                want = norms(loaded, ids)[layer].gather(-1, view.positions[row])
                torch.testing.assert_close(view.columns["value_norm"][row], want, rtol=1e-4, atol=1e-5)
    assert first


def test_norms_of_generated_tokens_are_computed_only_for_methods_that_evict_them(monkeypatch):
    counts = []
    norms_of = value_norm.projected_norms
    for base in ("snapkv(window=4)", "snapkv-decode(window=4)"):
        tokens = []
        monkeypatch.setattr(
            sys.modules[type(make("criticalkv", {})).__module__],
            "projected_norms",
            lambda new, tokens=tokens: (tokens.append(new.values.shape[2]), norms_of(new))[1],
        )
        engine = Engine(
            build("qwen3"), make("criticalkv", {"base": base}), budget=40, interval=16, slots=1, max_tokens=80
        )
        list(engine.generate(requests((31,), (30,), 1)))
        counts.append((31 in tokens, 1 in tokens))
    assert counts == [(True, False), (True, True)]


def test_latent_attention_is_refused():
    loaded = build("deepseek-v3")
    with pytest.raises(UserError, match="CriticalKV multiplies each head's values by the output projection"):
        fit(loaded.geometry, make("criticalkv", METHOD), 100)


class Packed(torch.nn.Linear):
    """As packages for quantised weights derive their layers."""


def test_a_matrix_that_is_not_at_hand_is_refused():
    loaded = build("llama")
    attention = loaded.model.model.layers[1].self_attn
    plain = attention.o_proj
    message = "which {} in layer 1 of model type 'llama'"
    attention.o_proj = Packed(plain.in_features, plain.out_features)
    with pytest.raises(UserError, match=message.format("is quantised or divided among devices")):
        EvictionCache(loaded.model, "defensivekv(window=4)", budget=20)
    attention.o_proj = torch.nn.Linear(plain.in_features, plain.out_features, device="meta")
    with pytest.raises(UserError, match=message.format("is offloaded")):
        layer_weights(loaded.model, loaded.geometry, O_PROJ)
    attention.o_proj = torch.nn.Linear(plain.in_features // 2, plain.out_features)
    with pytest.raises(UserError, match=message.format("reads 32 numbers, not 4 heads x 16")):
        layer_weights(loaded.model, loaded.geometry, O_PROJ)
    del attention.o_proj
    with pytest.raises(UserError, match=message.format("was not found")):
        layer_weights(loaded.model, loaded.geometry, O_PROJ)


def test_a_rehearsals_model_has_only_sizes():
    loaded = build("llama")
    matrix = layer_weights(loaded.model.to("meta"), loaded.geometry, O_PROJ)[1]["o_proj"]
    assert (matrix.is_meta, matrix.shape) == (True, (4, 16, 64))


def test_quantised_models_are_refused_before_they_are_loaded():
    config = transformers.LlamaConfig(quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UserError, match=r"method 'criticalkv' reads the output projection .* stays quantised \(gptq\)"):
        refuse_quantised("criticalkv", make("criticalkv", {}), config)
    refuse_quantised("gkv", make("gkv", {}), config)
    config = transformers.LlamaConfig(quantization_config={"quant_method": "fp8"})  # loaded as ordinary numbers
    refuse_quantised("criticalkv", make("criticalkv", {}), config)
