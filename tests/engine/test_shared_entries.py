"""Layers that compute no keys and values share the entries of an earlier layer, which stores and evicts them once.

`test_oracle.py` compares the logits of such models under eviction with one dense pass.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import pytest
import torch
from support.methods import small
from support.models import build, requests

from kvbench.engine.attention.geometry import homes, read_layers
from kvbench.engine.cache.layout import Lengths
from kvbench.engine.loop import Engine
from kvbench.engine.model.shape import read_shape
from kvbench.engine.plan import Machine, cell_footprint, roofline
from kvbench.errors import UserError
from kvbench.records import Sampling

MODELS = ("gemma3n", "gemma4")
PROMPT, NEW = 45, 20
GREEDY = requests(lengths=(PROMPT,), new_tokens=(NEW,), samples=1, sampling=Sampling())


def generated(loaded, method="full", budget=None, **more):
    engine = Engine(loaded, small(method), budget=budget, interval=8, slots=2, max_tokens=120, **more)
    [done] = engine.generate(GREEDY)
    return done, engine


@pytest.mark.parametrize("name", MODELS)
def test_layers_that_share_entries_are_found(name):
    loaded = build(name)
    assert {g.index: g.shared_by for g in loaded.geometry} == {0: (), 1: (), 2: (4, 6), 3: (5,)}
    assert homes(loaded.geometry) == {0: 0, 1: 1, 2: 2, 3: 3, 4: 2, 5: 3, 6: 2}
    assert read_shape(loaded.model.config).geometry == loaded.geometry  # without weights


@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_stored_numbers_are_those_of_the_models_own_cache(name):
    loaded = build(name)
    done, engine = generated(loaded)
    out = loaded.model.generate(
        torch.tensor([GREEDY[0].prompt_ids]), max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True
    )
    assert list(done.token_ids) == out.sequences[0, PROMPT:].tolist()
    own = [layer for layer in out.past_key_values.layers if layer.is_initialized]
    ours = engine.cache.layers
    assert [layer.keys.shape[1::2] for layer in own] == [layer.keys.shape[1::2] for layer in ours]  # heads, dimension
    full = [g for g in loaded.geometry if g.window is None]
    assert done.usage.entries_peak == PROMPT + NEW - 1
    held = (PROMPT + NEW - 1) * sum(g.entry_bytes(4) for g in full)
    rings = sum(layer.bytes() for layer in ours if layer.geometry.window is not None) // engine.cache.slots
    assert done.usage.kv_bytes_peak == held + rings


FORCED = [dataclasses.replace(GREEDY[0], forced=tuple(range(3, 3 + NEW)))]


def evictions(method, change=0.0, **more):
    """Return the logged positions, [layer][tokens seen][head], while the engine reads a forced answer.
    change: what is added to the query weights of the layers that share entries."""
    loaded, log = build("gemma3n"), defaultdict(dict)
    with torch.no_grad():
        for layer in (4, 5, 6):
            weight = loaded.model.model.layers[layer].self_attn.q_proj.weight
            weight += change * torch.randn(weight.shape, generator=torch.Generator().manual_seed(layer))

    def note(key, seen, layer, kept):
        log[layer][seen] = [sorted(head.tolist()) for head in kept]

    engine = Engine(loaded, small(method), budget=24, interval=8, slots=2, max_tokens=120, log=note, **more)
    [done] = engine.generate(FORCED)
    return log, done.log_probs


@pytest.mark.parametrize("layout", ["dense", "paged"])  # dense: steps sum h2o's attention; paged: queries are stored
@pytest.mark.parametrize("method", ["h2o", "gkv"])
def test_queries_of_layers_that_share_entries_do_not_score_them(method, layout):
    """Other queries in the layers that share entries change the answer, but no decision about an earlier layer."""
    (log, logits), (other, others) = (evictions(method, change, layout=layout) for change in (0.0, 1.0))
    assert set(log) == {0, 2}
    assert len(log[2]) >= 3
    assert log == other
    assert logits != others


def test_a_prompt_layer_is_evicted_after_the_last_layer_that_shares_it():
    """Else the later layers would read the prompt's attention from what was kept, and the first token would change."""
    loaded = build("gemma3n")
    want, _ = generated(loaded)
    got, _ = generated(loaded, "snapkv", 24)
    assert got.usage.entries_after_evict == 24
    assert got.token_ids[0] == want.token_ids[0]
    assert got.token_ids != want.token_ids


def test_the_hardware_limit_counts_a_reading_per_layer_that_attends():
    loaded = build("gemma3n")
    shape = read_shape(loaded.model.config)
    alone = tuple(dataclasses.replace(g, shared_by=()) for g in shape.geometry)
    machine = Machine(bandwidth=1e9, flops=1e15, memory=1 << 34)
    few, many = (
        1 / roofline(shape, machine, geometry, 1, 1000, 1000, torch.float32) for geometry in (alone, shape.geometry)
    )
    by_index = {g.index: g for g in shape.geometry}
    more = 2 * 1001 * _numbers(by_index[2]) + 25 * _numbers(by_index[3])
    assert many - few == pytest.approx(more * 4 / 1e9)


def _numbers(g):
    return g.kv_heads * (g.head_dim + g.value_dim)


def test_another_window_is_refused():
    model = build("gemma3n").model
    model.model.layers[6].self_attn.sliding_window = 24
    with pytest.raises(
        UserError, match="layer 6 shares the keys and values of layer 2, but with another sliding window"
    ):
        read_layers(model)


def test_the_plan_holds_a_shared_layer_in_full_until_its_last_use():
    """While layer 3 is read, layer 2 still holds the whole prompt: the bytes that its eviction would have freed."""
    shape = read_shape(build("gemma3n").model.config)
    alone = dataclasses.replace(shape, geometry=tuple(dataclasses.replace(g, shared_by=()) for g in shape.geometry))
    method, lengths = small("snapkv"), Lengths.of(4000, 1000, 0, 3000)
    sizes = dict(lengths=lengths, device=torch.device("cpu"), dtype=torch.float32, total=1 << 34, prefill_chunk=64)
    bytes_of = [cell_footprint(s, method, budget=48, interval=16, **sizes)[0].prompt for s in (alone, shape)]
    [shared] = [g for g in shape.geometry if g.index == 2]
    assert bytes_of[1] - bytes_of[0] == (3000 - 48) * shared.entry_bytes(4)
