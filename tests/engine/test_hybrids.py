"""Models whose other layers keep states: logits against the dense reference, and states that no neighbour changes."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import pytest
import torch
import transformers
from support import zoo
from support.families import FAMILIES, HYBRID
from support.methods import small, with_tables
from support.models import requests

from kvbench import EvictionCache, tiny
from kvbench.engine import sampler
from kvbench.engine.attention.layer_kinds import refuse_unsupported
from kvbench.engine.cache.layout import Lengths, plan_slot_bytes, shape_of
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import limit_time_steps, prepare
from kvbench.engine.model.load import load as from_folder
from kvbench.engine.plan import evictable_share
from kvbench.engine.reference import KeptHistory, dense_logits
from kvbench.errors import UserError
from kvbench.eviction import noise
from kvbench.records import Request

HYBRIDS = [f for f in FAMILIES if f.group == HYBRID]
BUDGET, INTERVAL, LONGEST = 24, 8, 160


def load(family, scale: float = 0.5):
    """A small model, with weights so small that rounding does not grow from layer to layer or turn a router."""
    model = zoo.build(zoo.configuration(family.model_type, family.changes), family.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    limit_time_steps(model)
    return prepare(model, transformers.AutoTokenizer.from_pretrained(tiny.path()))


@pytest.fixture(scope="module")
def qwen():
    return load(next(f for f in HYBRIDS if f.model_type == "qwen3_5"))


def engine(loaded, method="snapkv-decode", slots=2, **more):
    chosen = small(method)
    budget = BUDGET if chosen.takes_budget else None
    return Engine(loaded, chosen, budget=budget, interval=INTERVAL, slots=slots, max_tokens=LONGEST, **more)


def worst_difference(loaded, monkeypatch, **more):
    """Largest |logit - dense logit| over every generated token, and the number of evictions."""
    drawn, original = defaultdict(list), sampler.draw

    def spy(logits, keys, steps, sampling):
        for row, key, step in zip(logits, keys.tolist(), steps.tolist()):
            drawn[key, step] = row.clone()
        return original(logits, keys, steps, sampling)

    monkeypatch.setattr(sampler, "draw", spy)
    history, evictions, worst = KeptHistory(), 0, 0.0
    todo = requests(lengths=(9, 45, 30, 61), new_tokens=(40, 20, 35, 15), samples=1)
    for done in engine(loaded, prefill_chunk=20, tail=40, log=history, **more).generate(todo):
        request, key = done.request, noise.signed64(done.request.noise_key(done.sample))
        ids = [*request.prompt_ids, *done.token_ids[:-1]]
        dense = dense_logits(loaded, ids, history, [noise.signed64(request.noise_key(-1)), key])
        for step in range(len(done.token_ids)):
            difference = (drawn[key, step] - dense[len(request.prompt_ids) - 1 + step]).abs().max()
            worst = max(worst, float(difference))
        evictions += done.usage.evictions
    return worst, evictions


@pytest.mark.parametrize("family", HYBRIDS, ids=lambda f: f.name.replace(" ", "-"))
def test_a_prompt_read_in_chunks_has_the_logits_of_one_pass(family):
    loaded, ids = load(family), torch.randint(3, 250, (1, 50), generator=torch.Generator().manual_seed(3))
    whole = loaded.model(ids, use_cache=False).logits[0, -1].detach()
    running = engine(loaded, "full", prefill_chunk=16)
    read = Request(task="t", doc_id="0", prompt_ids=tuple(ids[0].tolist()), max_new_tokens=1)
    with torch.inference_mode(), running.reader.model.routed():
        prompt = running.reader.read(read, running.setup.rules_for_prompt(50))
    assert float((prompt.logits - whole).abs().max()) < 1e-4


@pytest.mark.parametrize("family", HYBRIDS, ids=lambda f: f.name.replace(" ", "-"))
def test_logits_equal_the_dense_reference(family, monkeypatch):
    """More sequences than slots, prompts longer than a chunk, evictions, refills."""
    worst, evictions = worst_difference(load(family), monkeypatch)
    assert evictions > 4
    assert worst < 1e-4


def test_a_loaded_model_has_the_limits_of_time_steps_of_its_configuration(tmp_path):
    """transformers sets others, which only passes of several tokens apply; a model of the user stays as it is."""
    family = next(f for f in HYBRIDS if f.model_type == "nemotron_h")
    folder = zoo.repository(tmp_path / "model", zoo.configuration(family.model_type, family.changes))

    def limits(model):
        return {module.time_step_limit for module in model.modules() if hasattr(module, "time_step_limit")}

    own = transformers.AutoModelForCausalLM.from_pretrained(folder)
    prepare(own, None)
    assert limits(own) == {(own.config.time_step_min, float("inf"))}
    assert limits(from_folder(str(folder), device="cpu").model) == {(0.0, float("inf"))}


@pytest.mark.parametrize("method", ["gkv", "kvzip", "laq", "cake", "ada-kv", "retention", "lookaheadkv", "foresightkv"])
def test_every_way_to_read_a_prompt_equals_the_dense_reference(method, qwen, monkeypatch):
    """Layer by layer, whole, with probes whose tokens must not stay in the states, and in the paged layout."""
    worst, evictions = worst_difference(with_tables(qwen), monkeypatch, method=method)
    assert evictions > 0
    assert worst < 1e-4


@pytest.mark.parametrize("prefill", ["full", "chunked"])
def test_tokens_are_bit_equal_alone_beside_neighbours_and_after_a_refill(qwen, prefill):
    todo = requests(lengths=(9, 45, 30, 61), new_tokens=(40, 20, 35, 15), samples=2)

    def tokens(some, **more):
        done = engine(qwen, prefill=prefill, prefill_chunk=16, slots=3, **more).generate(some)
        return {(d.request.doc_id, d.sample): d.token_ids for d in done}

    together = tokens(todo)
    assert tokens(todo[::-1]) == together
    for request in todo:
        alone = dataclasses.replace(request, samples=(1,))
        assert tokens([alone])[request.doc_id, 1] == together[request.doc_id, 1]


@pytest.mark.parametrize("layout", ["dense", "paged"])
def test_the_states_of_a_sequence_with_nan_do_not_reach_the_others(qwen, layout):
    """Its slot stays idle beside them: every step reads it too."""
    long, short = requests(lengths=(30, 12), new_tokens=(8, 30), samples=1)
    [alone] = engine(qwen, "full", layout=layout).generate([short])
    bad = min(set(range(1, 100)) - {*alone.token_ids, *short.prompt_ids, *long.prompt_ids, 5, 6})  # idle slots read 0

    def poison(module, inputs, out):
        return torch.where(inputs[0][..., None] == bad, float("nan"), out)

    hook = qwen.model.get_input_embeddings().register_forward_hook(poison)
    try:
        todo = [dataclasses.replace(long, forced=(5, 6, bad, 5, 6, 5, 6, 5)), short]
        done = {d.request.doc_id: d for d in engine(qwen, "full", layout=layout).generate(todo)}
    finally:
        hook.remove()
    assert [done[r.doc_id].status for r in (long, short)] == ["nan_logits", "ok"]
    assert done[short.doc_id].token_ids == alone.token_ids


def test_states_are_planned_counted_and_never_evicted(qwen):
    running = engine(qwen)
    expected = sum(s.bytes for s in qwen.states)
    assert expected > 0
    assert running.cache.state_bytes == expected
    shape = shape_of(qwen.geometry, running.method, BUDGET, INTERVAL, Lengths.of(LONGEST), 1, states=qwen.states)
    assert plan_slot_bytes(qwen.geometry, running.method, shape, qwen.dtype) == running.cache.slot_bytes()
    for done in running.generate(requests(lengths=(45, 30), new_tokens=(20, 35), samples=1)):
        assert done.usage.state_bytes == expected
        assert done.usage.kv_bytes_extra > expected
        assert done.usage.kv_bytes_peak <= done.usage.kv_bytes_slot
        assert done.usage.entries_after_evict <= BUDGET
    share = evictable_share(qwen.geometry, qwen.states, LONGEST, qwen.dtype)
    entries = LONGEST * sum(g.entry_bytes(4) for g in qwen.geometry)
    assert share == entries / (entries + expected)


@pytest.mark.parametrize("method", ["gkv", "kvzip"])
def test_a_batch_in_generate_has_the_tokens_of_each_prompt_alone(qwen, method):
    """A method with probes reads the prompts one by one; each must continue its own states."""
    ids = torch.randint(3, 250, (3, 40), generator=torch.Generator().manual_seed(5))

    def tokens(rows, budget):
        with EvictionCache(
            qwen.model, small(method), budget=budget, interval=INTERVAL, tokenizer=qwen.tokenizer
        ) as cache:
            lengths = {"min_new_tokens": 20, "max_new_tokens": 20}
            return qwen.model.generate(rows, past_key_values=cache, do_sample=False, **lengths)[:, 40:].tolist()

    for budget in (BUDGET, 64):  # with and without an eviction of the prompt
        assert tokens(ids, budget) == [tokens(row[None], budget)[0] for row in ids]


def test_padded_prompts_are_refused(qwen):
    ids = torch.randint(3, 250, (2, 20))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with (
        EvictionCache(qwen.model, small("gkv"), budget=BUDGET) as cache,
        pytest.raises(UserError, match="pads would change the states"),
    ):
        qwen.model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=2)


def test_layers_of_an_unknown_kind_are_refused_by_name(qwen):
    config = qwen.model.config.get_text_config()
    kinds = config.layer_types
    try:
        config.layer_types = ["resonant_attention", *kinds[1:]]
        with pytest.raises(UserError, match="resonant_attention"):
            refuse_unsupported(config)
    finally:
        config.layer_types = kinds
