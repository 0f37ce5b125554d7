"""The planned activations of a pass through layers with states, against what torch's allocator measures on a CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support import zoo
from support.families import FAMILIES, HYBRID
from support.methods import small
from torch.profiler import ProfilerActivity, profile

from kvbench.engine.attention.interface import route, run
from kvbench.engine.cache.layout import Lengths, fit, shape_of
from kvbench.engine.cache.recurrent import RecurrentStates
from kvbench.engine.footprint import footprint
from kvbench.engine.model.shape import read_shape, shape_of_model

SIZES = {"hidden_size": 128, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32}
MAMBA = ("bamba", {"attn_layer_indices": [1]} | SIZES)
GATED_DELTA = ("qwen3_next", {"linear_key_head_dim": 64, "linear_value_head_dim": 64})


def measured(config, tokens: int) -> int:
    """Most bytes that the CPU's allocator gives out during one pass that continues the states of a sequence."""
    model = zoo.build(config)
    states = RecurrentStates.allocate(shape_of_model(model).states, 1, torch.device("cpu"))
    inputs = {"input_ids": torch.ones(1, tokens, dtype=torch.long), "position_ids": torch.arange(tokens)[None]}

    def no_attention(call):
        return call.value.new_zeros(1, tokens, call.query.shape[1], call.value.shape[-1])

    with torch.inference_mode(), route(model, no_attention):
        run(model, states, **inputs, logits_to_keep=1)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            run(model, states, **inputs, logits_to_keep=1)
    held = most = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


@pytest.mark.parametrize(("kind", "slack"), [(MAMBA, 1.05), (GATED_DELTA, 1.35)], ids=["mamba-2", "gated-delta"])
@pytest.mark.parametrize("tokens", [40, 300])
def test_planned_bytes_of_a_pass_are_those_measured(kind, slack, tokens):
    """Slack: in float32 some casts of the model's code copy nothing, but the plan counts their copies."""
    config = zoo.configuration(*kind)
    planned, real = read_shape(config).traced(tokens, torch.float32), measured(config, tokens)
    assert real <= 1.01 * planned
    assert planned <= slack * real


def test_a_chunk_bounds_the_activations_of_a_long_prompt():
    config = zoo.configuration(*MAMBA)
    shape, method = read_shape(config), small("full")
    geometry = fit(shape.geometry, method, 4096)
    held = shape_of(shape.geometry, method, None, 8, Lengths.of(4096), 1, shape.states)

    def planned(block):
        sizes = dict(prompt_rows=4096, tail=0, budget=None, interval=8, block=block, prefill="full")
        return footprint(shape, geometry, method, held, torch.float32, **sizes, at_once=1 << 20, gpu=False).prompt

    plain = dataclasses.replace(shape, traced=None)
    assert plain.activations(256, torch.float32) < shape.activations(256, torch.float32) / 5
    assert planned(256) < planned(1024) / 2
    assert planned(1024) > shape.traced(1024, torch.float32) > 3 * shape.traced(256, torch.float32)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.group == HYBRID], ids=lambda f: f.name.replace(" ", "-"))
def test_every_hybrid_is_planned_without_weights(family):
    shape = read_shape(zoo.configuration(family.model_type, family.changes))
    one, many = (shape.activations(tokens, torch.bfloat16) for tokens in (1, 600))
    assert 0 < one < many


def test_a_model_without_states_is_planned_by_its_width():
    shape = read_shape(zoo.configuration("qwen3", {}))
    assert shape.traced is None
    assert shape.activations(7, torch.float32) == 28 * shape.width
