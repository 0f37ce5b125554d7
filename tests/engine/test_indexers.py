"""Sparse attention with an indexer: index keys are stored and evicted with the entries, and the model's own indexer
chooses among the entries that are left.

`test_oracle.py` compares the logits of such a model under eviction with one dense pass, `test_zoo.py` the answers of
every family with those of transformers.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import pytest
import torch
import transformers
from engine.test_hybrids import BUDGET, INTERVAL, LONGEST, engine, load, worst_difference
from engine.test_latent import named
from support import zoo
from support.families import FAMILIES, INDEXED, SPARSE
from support.methods import small
from support.models import build, requests
from support.pretend_cuda import pretended_cuda
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

from kvbench import EvictionCache
from kvbench.engine.attention import indexer
from kvbench.engine.attention.indexer import IndexerCall, scores_bytes
from kvbench.engine.attention.interface import route, run
from kvbench.engine.loop import Engine
from kvbench.engine.meta import Answers, MetaBytes
from kvbench.engine.model.load import prepare
from kvbench.engine.model.shape import estimate_shape, read_shape
from kvbench.engine.plan import Machine, roofline
from kvbench.errors import UserError
from kvbench.records import Sampling

FAMILY = [f for f in FAMILIES if f.group == SPARSE]
RANK, ROTARY, INDEX, TOPK, HEADS = 16, 8, 16, 8, 16


@pytest.fixture(scope="module")
def sparse():
    return load(next(f for f in FAMILY if f.model_type == "deepseek_v32"))


@named(FAMILY)
def test_an_entry_is_a_latent_a_rotary_part_and_an_index_key(family):
    loaded = load(family)
    for g in loaded.geometry:
        assert (g.head_dim, g.value_dim, g.latent, g.read_dim) == (RANK + ROTARY, INDEX, RANK, RANK)
        assert (g.topk, g.indexer_heads) == (TOPK, HEADS)
        assert g.entry_bytes(4) == 4 * (RANK + ROTARY + INDEX) + 4
    config = zoo.configuration(family.model_type, family.changes)
    assert read_shape(config).geometry == loaded.geometry
    [entry] = {g.entry_bytes(2) for g in estimate_shape(config).geometry}
    assert entry == loaded.geometry[0].entry_bytes(2)


@named(FAMILY)
def test_logits_equal_the_dense_reference(family, monkeypatch):
    worst, evictions = worst_difference(load(family), monkeypatch)
    assert evictions > 4
    assert worst < 1e-4


@pytest.mark.parametrize("method", ["h2o", "kvzip", "laq", "ada-kv", "keydiff", "pyramidkv", "lagkv", "caote"])
def test_every_way_to_read_a_prompt_equals_the_dense_reference(method, sparse, monkeypatch):
    """Layer by layer, whole, with probes, with sums of attention, and in the paged layout."""
    worst, evictions = worst_difference(sparse, monkeypatch, method=method)
    assert evictions > 0
    assert worst < 1e-4


@pytest.mark.parametrize("more", [{"prefill": "chunked"}, {"layout": "paged"}], ids=["chunked", "paged"])
def test_other_prefill_and_layout_equal_the_dense_reference(sparse, monkeypatch, more):
    worst, evictions = worst_difference(sparse, monkeypatch, **more)
    assert evictions > 4
    assert worst < 1e-4


def test_scores_are_computed_in_blocks_of_queries(sparse, monkeypatch):
    """Else a prompt of 32,000 tokens would take gigabytes per block of queries."""
    monkeypatch.setattr(indexer, "SCORES_BYTES", 4 * HEADS * 45 * 3)
    worst, _ = worst_difference(sparse, monkeypatch)
    assert worst < 1e-4


@pytest.mark.parametrize("layout", ["dense", "paged"])
def test_tokens_are_bit_equal_alone_and_beside_neighbours(sparse, layout):
    todo = requests(lengths=(9, 45, 30, 61), new_tokens=(40, 20, 35, 15), samples=2)

    def tokens(some):
        done = engine(sparse, prefill_chunk=16, slots=3, layout=layout).generate(some)
        return {(d.request.doc_id, d.sample): d.token_ids for d in done}

    together = tokens(todo)
    assert tokens(todo[::-1]) == together
    alone = dataclasses.replace(todo[1], samples=(1,))
    assert tokens([alone])[alone.doc_id, 1] == together[alone.doc_id, 1]


def test_without_a_bound_a_slot_reads_its_own_length(monkeypatch):
    """Above `FIXED_ROWS` places a step attends slot by slot, each with its own part of the indexer's call."""
    monkeypatch.setattr("kvbench.engine.step_writers.FIXED_ROWS", 16)
    loaded = load(FAMILY[0], scale=1.0)
    todo = requests(lengths=(40, 21), new_tokens=(20, 20), samples=1, sampling=Sampling(temperature=0.0))
    for done in list(engine(loaded, "full", slots=2).generate(todo)):
        ids = torch.tensor([done.request.prompt_ids])
        out = loaded.model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :].tolist()
        assert list(done.token_ids) == out[: len(done.token_ids)]


def test_an_eviction_cache_has_the_tokens_of_the_engine_for_padded_prompts(sparse):
    loaded = load(FAMILY[0], scale=1.0)
    todo = requests(lengths=(45, 33), new_tokens=(30, 30), samples=1, sampling=Sampling(temperature=0.0))
    wanted = {d.request.doc_id: list(d.token_ids) for d in engine(loaded, "gkv").generate(todo)}
    rows = [[0] * (45 - len(r.prompt_ids)) + list(r.prompt_ids) for r in todo]
    mask = torch.tensor([[0] * (45 - len(r.prompt_ids)) + [1] * len(r.prompt_ids) for r in todo])
    with EvictionCache(loaded.model, small("gkv"), budget=BUDGET, interval=INTERVAL) as cache:
        out = loaded.model.generate(
            torch.tensor(rows), attention_mask=mask, past_key_values=cache, max_new_tokens=30, do_sample=False
        )
    for request, answer in zip(todo, out[:, 45:].tolist()):
        want = wanted[request.doc_id]
        assert answer[: len(want)] == want


@pytest.mark.parametrize(("topk", "asked"), [(8, True), (200, False)])
@pytest.mark.parametrize("layout", ["dense", "paged"])
def test_on_a_gpu_steps_ask_the_indexer_only_if_it_has_a_choice(topk, asked, layout):
    """With few entries the kernels attend, and the index keys lie in the cache for the time when there are more."""
    config = zoo.configuration("deepseek_v32", INDEXED | {"index_topk": topk})
    todo = requests(lengths=(9, 45, 30), new_tokens=(20, 12, 25), samples=1, sampling=Sampling())
    sizes = dict(budget=BUDGET, interval=INTERVAL, slots=2, max_tokens=LONGEST, layout=layout)

    def answers(made):
        done = {d.request.doc_id: d.token_ids for d in made.generate(todo)}
        return done, [(layer.keys, layer.values) for layer in made.cache.layers] if layout == "dense" else []

    wanted, stored = answers(Engine(prepare(zoo.build(config), None), small("tova"), **sizes, look=1))
    with pretended_cuda():
        made = Engine(
            prepare(zoo.build(config).to("cuda"), None),
            small("tova"),
            **sizes,
            backend="torch",
            compiled=False,
        )
        got, beside = answers(made)
        assert got == wanted
        assert (made.steps.writer.decode is None) == asked
        for (keys, index_keys), (other_keys, other_index_keys) in zip(stored, beside, strict=True):
            same = (keys == other_keys.cpu()).all(-1)  # ended sequences go on until the host looks
            assert same.float().mean() > 0.9
            torch.testing.assert_close(other_index_keys.cpu()[same], index_keys[same])


def test_hooks_leave_nothing_behind(sparse):
    before = {name: (len(m._forward_pre_hooks), len(m._forward_hooks)) for name, m in sparse.model.named_modules()}
    ids = torch.arange(3, 33)[None]
    at = torch.arange(30)[None]
    found = []

    def attend(call):
        found.append(call.indexer.key.shape)
        return call.value.new_zeros(1, 30, call.query.shape[1], call.value.shape[-1])

    with route(sparse.model, attend), torch.no_grad():
        run(sparse.model, input_ids=ids, position_ids=at)
    assert found == [(1, 1, 30, INDEX)] * 2
    after = {name: (len(m._forward_pre_hooks), len(m._forward_hooks)) for name, m in sparse.model.named_modules()}
    assert after == before


def test_the_hardware_limit_counts_chosen_entries_and_all_index_keys():
    shape = read_shape(build("deepseek-v3.2").model.config)
    machine = Machine(bandwidth=1e9, flops=1e15, memory=1 << 34)
    plain = tuple(dataclasses.replace(g, topk=0) for g in shape.geometry)
    sparse, dense = (
        1 / roofline(shape, machine, geometry, 1, 1000, 1000, torch.float32) for geometry in (shape.geometry, plain)
    )
    assert dense - sparse == pytest.approx(3 * 990 * (RANK + ROTARY) * 4 / 1e9)
    few, all_of_few = (1 / roofline(shape, machine, g, 1, 9, 9, torch.float32) for g in (shape.geometry, plain))
    assert all_of_few - few == pytest.approx(3 * 9 * INDEX * 4 / 1e9)


@pytest.mark.parametrize(("b", "t", "n"), [(1, 1, 8_320), (64, 1, 8_320), (1, 512, 8_192), (1, 512, 32_768)])
@pytest.mark.parametrize("heads", [16, 64])
def test_the_plan_counts_at_least_the_bytes_of_scores(heads, b, t, n):
    """An indexer of DeepSeek-V3.2's sizes chooses on the meta device, where every tensor is counted."""
    size, dtype = 128, torch.bfloat16
    config = transformers.DeepseekV32Config(index_n_heads=heads, index_head_dim=size)
    with torch.device("meta"):
        module = DeepseekV32Indexer(config, 0).to(dtype)
        hidden, residual, angles = (
            torch.empty(b, t, width, dtype=dtype) for width in (config.hidden_size, config.q_lora_rank, 64)
        )
        key, keys = torch.empty(b, 1, t, size, dtype=dtype), torch.empty(b, 1, n, size, dtype=dtype)
        bias = torch.empty(1, 1, t, n, dtype=dtype)
    inputs = {"hidden_states": hidden, "q_resid": residual, "position_embeddings": (angles, angles)}
    call = IndexerCall(module, key, inputs | {"position_ids": None})
    with torch.inference_mode(), MetaBytes(Answers()) as live:
        given = live.now
        call.hide(keys, bias)
    counted = b * scores_bytes(heads, size, t, n)
    assert (live.peak - given) <= counted + b * 4 * heads * size * min(t, 512) * 4  # and the indexer's own queries
    assert counted <= 6 * (live.peak - given)


def test_methods_see_attention_to_all_entries_in_both_layouts():
    """Dense steps sum attention, paged ones store queries: the indexer's choice changes neither."""
    loaded = build("deepseek-v3.2")
    with torch.no_grad():
        for layer in loaded.model.model.layers:
            layer.self_attn.q_b_proj.weight *= 30  # attention so sharp that a choice of ten entries shows
            layer.self_attn.kv_a_proj_with_mqa.weight *= 30
    todo = requests(lengths=(61,), new_tokens=(60,), samples=1, sampling=Sampling())

    def kept(layout):
        log = defaultdict(list)

        def note(key, seen, layer, heads):
            log[layer].append((seen, [sorted(head.tolist()) for head in heads]))

        sizes = dict(budget=24, interval=8, slots=1, max_tokens=160, layout=layout)
        [done] = Engine(loaded, small("h2o"), **sizes, log=note).generate(todo)
        return log, done.token_ids

    assert kept("dense") == kept("paged")


def test_pools_of_tokens_are_refused():
    config = zoo.configuration("glm5_next", {"text_config": {"qk_rope_head_dim": 0, "head_dim": 0}})
    with pytest.raises(UserError, match="chooses pools of neighbouring tokens, which evictions would tear apart"):
        read_shape(config)
