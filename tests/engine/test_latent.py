"""Latent attention: what is stored, and the logits of the dense reference, which attends to the expanded heads."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from engine.test_hybrids import BUDGET, INTERVAL, LONGEST, engine, load, worst_difference
from support import zoo
from support.families import FAMILIES, LATENT
from support.methods import small, with_tables
from support.models import requests

from kvbench import EvictionCache
from kvbench.engine.attention.latent import Latent
from kvbench.engine.attention.positions import check_latents
from kvbench.engine.cache.layout import Lengths, plan_slot_bytes, shape_of
from kvbench.engine.model.load import prepare
from kvbench.engine.model.shape import estimate_shape
from kvbench.errors import UserError
from kvbench.records import Sampling

FAMILY = [f for f in FAMILIES if f.group == LATENT or f.model_type == "kimi_linear"]
RANK, ROTARY, HEADS = 16, 8, 4


def named(families):
    return pytest.mark.parametrize("family", families, ids=lambda f: f.name.replace(" ", "-"))


@pytest.fixture(scope="module")
def deepseek():
    return load(next(f for f in FAMILY if f.model_type == "deepseek_v3"))


@named(FAMILY)
def test_an_entry_is_one_latent_and_one_rotary_part_for_all_heads(family):
    loaded = load(family)
    for g in loaded.geometry:
        assert (g.query_heads, g.kv_heads, g.group) == (HEADS, 1, HEADS)
        assert (g.head_dim, g.value_dim, g.latent, g.read_dim) == (RANK + ROTARY, 0, RANK, RANK)
        assert g.entry_bytes(4) == 4 * (RANK + ROTARY) + 4


@named(FAMILY)
def test_logits_equal_the_dense_reference(family, monkeypatch):
    """More sequences than slots, prompts longer than a chunk, evictions, refills."""
    worst, evictions = worst_difference(load(family), monkeypatch)
    assert evictions > 4
    assert worst < 1e-4


METHODS = [
    "gkv",
    "h2o",
    "streaming-llm",
    "kvzip",
    "laq",
    "cake",
    "ada-kv",
    "keydiff",
    "rkv",
    "pyramidkv",
    "morphkv",
    "lagkv",
    "caote",
]


@pytest.mark.parametrize("method", METHODS)
def test_every_way_to_read_a_prompt_equals_the_dense_reference(method, deepseek, monkeypatch):
    """Layer by layer, whole, with probes, and in the paged layout."""
    worst, evictions = worst_difference(with_tables(deepseek), monkeypatch, method=method)
    assert evictions > 0
    assert worst < 1e-4


@pytest.mark.parametrize("more", [{"prefill": "chunked"}, {"layout": "paged"}], ids=["chunked", "paged"])
def test_other_prefill_and_layout_equal_the_dense_reference(deepseek, monkeypatch, more):
    worst, evictions = worst_difference(deepseek, monkeypatch, **more)
    assert evictions > 4
    assert worst < 1e-4


@named(FAMILY)
def test_full_has_the_tokens_of_generate(family):
    loaded = load(family, scale=1.0)
    ids = torch.randint(3, 250, (1, 40), generator=torch.Generator().manual_seed(3))
    expected = loaded.model.generate(ids, max_new_tokens=20, do_sample=False)[0, 40:].tolist()
    [request] = requests(lengths=(40,), new_tokens=(20,), samples=1, sampling=Sampling(temperature=0.0))
    request = dataclasses.replace(request, prompt_ids=tuple(ids[0].tolist()))
    [done] = engine(loaded, "full", prefill_chunk=16).generate([request])
    assert list(done.token_ids) == expected[: len(done.token_ids)]
    assert len(done.token_ids) == 20 or done.token_ids[-1] in loaded.stop_ids
    with EvictionCache(loaded.model, "full", tokenizer=loaded.tokenizer) as cache:
        out = loaded.model.generate(ids, past_key_values=cache, max_new_tokens=20, do_sample=False)
    assert out[0, 40:].tolist() == expected


@named(FAMILY)
def test_generate_with_an_eviction_cache_has_the_tokens_of_the_engine(family):
    loaded = load(family, scale=1.0)
    [request] = requests(lengths=(45,), new_tokens=(30,), samples=1, sampling=Sampling(temperature=0.0))
    [done] = engine(loaded, "gkv").generate([request])
    ids = torch.tensor([request.prompt_ids])
    with EvictionCache(
        loaded.model, small("gkv"), budget=BUDGET, interval=INTERVAL, tokenizer=loaded.tokenizer
    ) as cache:
        out = loaded.model.generate(ids, past_key_values=cache, max_new_tokens=30, do_sample=False)
    assert out[0, 45 : 45 + len(done.token_ids)].tolist() == list(done.token_ids)


@pytest.mark.parametrize("prefill", ["full", "chunked"])
@pytest.mark.parametrize("layout", ["dense", "paged"])
def test_tokens_are_bit_equal_alone_beside_neighbours_and_after_a_refill(deepseek, prefill, layout):
    todo = requests(lengths=(9, 45, 30, 61), new_tokens=(40, 20, 35, 15), samples=2)

    def tokens(some):
        done = engine(deepseek, prefill=prefill, prefill_chunk=16, slots=3, layout=layout).generate(some)
        return {(d.request.doc_id, d.sample): d.token_ids for d in done}

    together = tokens(todo)
    assert tokens(todo[::-1]) == together
    for request in todo:
        alone = dataclasses.replace(request, samples=(1,))
        assert tokens([alone])[request.doc_id, 1] == together[request.doc_id, 1]


def test_the_maps_give_a_vector_the_same_bits_in_any_slot(deepseek):
    """At the sizes of a real layer too, where a matrix product may work in tiles of rows."""
    draw = torch.Generator().manual_seed(0)
    heads, plain, rank, slots = 16, 128, 512, 13
    up = torch.randn(heads, plain, rank, generator=draw)
    maps = Latent(up, up)
    query, out = torch.randn(heads, 1, plain + 64, generator=draw), torch.randn(1, heads, rank, generator=draw)
    beside = torch.randn(slots, heads, 1, plain + 64, generator=draw)
    means = torch.randn(slots, 1, heads, rank, generator=draw)
    seen = []
    for slot in range(slots):
        beside[slot], means[slot] = query, out
        seen.append((maps.queries(beside)[slot], maps.outputs(means)[slot]))
    assert all(torch.equal(a, seen[0][0]) and torch.equal(b, seen[0][1]) for a, b in seen)


def test_a_plan_without_weights_counts_the_latent_form():
    """LongCat's layers cannot be read on the meta device, so a dry run estimates them from its configuration."""
    family = next(f for f in FAMILY if f.estimated)
    guess = estimate_shape(zoo.configuration(family.model_type, family.changes)).geometry
    known = load(family).geometry
    assert [(g.kv_heads, g.latent, g.entry_bytes(2)) for g in guess] == [
        (g.kv_heads, g.latent, g.entry_bytes(2)) for g in known
    ]


@pytest.mark.parametrize("layout", ["dense", "paged"])
def test_bytes_are_those_of_the_latent_form(deepseek, layout):
    running = engine(deepseek, "streaming-llm", layout=layout)
    layers = len(deepseek.geometry)
    shape = shape_of(deepseek.geometry, running.method, BUDGET, INTERVAL, Lengths.of(LONGEST), 1)
    if layout == "dense":
        assert plan_slot_bytes(deepseek.geometry, running.method, shape, deepseek.dtype) == running.cache.slot_bytes()
        assert running.cache.slot_bytes() == layers * shape.rows * (4 * (RANK + ROTARY) + 4)
    for done in running.generate(requests(lengths=(45, 30), new_tokens=(21, 35), samples=1)):
        usage = done.usage
        assert usage.entries_after_evict <= BUDGET
        assert usage.kv_bytes_peak <= usage.kv_bytes_slot
        if layout == "dense":
            stored = usage.kv_bytes_peak - usage.kv_bytes_extra
            assert stored == layers * usage.entries_peak * 4 * (RANK + ROTARY)


def test_entries_per_query_head_are_refused(deepseek):
    with pytest.raises(UserError, match="24 numbers per token for all heads; entries per query head would be 4 copies"):
        engine(deepseek, "snapkv by query head")


@pytest.mark.parametrize("method", ["retention", "trimkv", "duo", "headkv", "foresightkv", "lookaheadkv"])
def test_weights_per_head_are_refused(deepseek, method):
    with pytest.raises(UserError, match=f"method '{method}' reads weights made for each KV head"):
        engine(with_tables(deepseek), method)


def test_a_projection_that_is_no_plain_layer_is_read_by_what_it_does(deepseek):
    """Quantised layers, and layers with an adapter: their `weight`, if any, is not what they multiply with."""

    class Halved(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.weight = inner, inner.weight

        def forward(self, x):
            return self.inner(x) / 2

    attention = deepseek.model.model.layers[0].self_attn
    plain = attention.kv_b_proj
    try:
        attention.kv_b_proj = Halved(plain)
        check_latents(deepseek.model)
    finally:
        attention.kv_b_proj = plain


def test_a_model_that_expands_latents_otherwise_is_refused(deepseek):
    attention = deepseek.model.model.layers[1].self_attn
    before = attention.kv_b_proj
    try:
        attention.kv_b_proj = torch.nn.Linear(before.in_features, before.out_features, bias=True)
        with torch.no_grad():
            attention.kv_b_proj.bias.fill_(1.0)
        with pytest.raises(UserError, match="expands latents in a way"):
            prepare(deepseek.model, deepseek.tokenizer)
    finally:
        attention.kv_b_proj = before
