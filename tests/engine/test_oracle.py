"""The engine against one dense forward pass under the logged masks, for many architectures and every method."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import pytest
import torch
from support.methods import EVICTING, VARIANTS, small, with_tables
from support.models import ARCHITECTURES, build, requests

from kvbench import registry
from kvbench.engine.attention.geometry import for_lengths
from kvbench.engine.loop import Engine
from kvbench.engine.reference import KeptHistory, dense_logits
from kvbench.eviction import noise


def largest_difference(loaded, method_name, *, budget, interval, slots, todo, monkeypatch, **more):
    """Largest |logit - dense logit| over every generated token, and the evictions that happened."""
    seen = defaultdict(list)
    from kvbench.engine import sampler

    original = sampler.draw

    def spy(logits, keys, steps, sampling):
        for row, key, step in zip(logits, keys.tolist(), steps.tolist()):
            seen[key, step] = row.clone()
        return original(logits, keys, steps, sampling)

    monkeypatch.setattr(sampler, "draw", spy)
    history = KeptHistory()
    method = small(method_name)
    engine = Engine(
        loaded,
        method,
        budget=budget,
        interval=interval,
        slots=slots,
        max_tokens=160,
        prefill_chunk=20,
        tail=40,
        log=history,
        **more,
    )
    worst, evictions, finished = 0.0, 0, 0
    for done in engine.generate(todo):
        request, key = done.request, noise.signed64(done.request.noise_key(done.sample))
        ids = [*request.prompt_ids, *done.token_ids[:-1]]
        dense = dense_logits(loaded, ids, history, [noise.signed64(request.noise_key(-1)), key])
        for step in range(len(done.token_ids)):
            worst = max(worst, float((seen[key, step] - dense[len(request.prompt_ids) - 1 + step]).abs().max()))
        evictions += done.usage.evictions
        finished += 1
    assert finished == sum(len(r.samples) for r in todo)
    return worst, evictions


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("slots", ["fewer", "more"])
def test_every_architecture_equals_the_dense_oracle(name, slots, monkeypatch):
    loaded = build(name)
    todo = requests(lengths=(9, 45, 30, 61), new_tokens=(40, 20, 35, 15), samples=1)
    count = len(todo) - 2 if slots == "fewer" else len(todo) + 2  # refills, or idle slots beside them
    evicting = any(g.evicts for g in for_lengths(loaded.geometry, 160))  # else only the rings are compared
    method = "snapkv-decode" if evicting else "full"
    worst, evictions = largest_difference(
        loaded, method, budget=24 if evicting else None, interval=8, slots=count, todo=todo, monkeypatch=monkeypatch
    )
    assert evictions > 4 or not evicting
    assert worst < 1e-4


@pytest.mark.parametrize("method", [*EVICTING, *VARIANTS])
def test_every_method_equals_the_dense_oracle(method, monkeypatch):
    todo = requests(lengths=(9, 45, 30), new_tokens=(40, 20, 35), samples=2)
    worst, evictions = largest_difference(
        with_tables(build("qwen3")), method, budget=24, interval=8, slots=3, todo=todo, monkeypatch=monkeypatch
    )
    assert evictions >= 4
    assert worst < 1e-4


@pytest.mark.parametrize("name", ["gemma2", "gemma3n", "gpt-oss", "qwen2-sliding", "phi"])
@pytest.mark.parametrize("method", ["ada-kv while decoding", "kvzip"])
def test_uneven_budgets_on_other_architectures(method, name, monkeypatch):
    todo = requests(lengths=(9, 45, 30), new_tokens=(40, 20, 35), samples=1)
    worst, evictions = largest_difference(
        build(name), method, budget=24, interval=8, slots=2, todo=todo, monkeypatch=monkeypatch
    )
    assert evictions >= 2
    assert worst < 1e-4


@pytest.mark.parametrize("method", ["snapkv", "ada-kv", "h2o", "gkv", "expected-attention"])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "gemma3n"])
def test_prompts_evicted_chunk_by_chunk(method, architecture, monkeypatch):
    todo = requests(lengths=(9, 75, 60), new_tokens=(40, 20, 35), samples=1)
    worst, evictions = largest_difference(
        build(architecture),
        method,
        budget=24,
        interval=8,
        slots=2,
        todo=todo,
        monkeypatch=monkeypatch,
        prefill="chunked",
    )
    assert evictions >= 4
    assert worst < 1e-4


@pytest.mark.parametrize("method", ["snapkv", "ada-kv", "h2o", "gkv", "kvzip", "laq"])
def test_a_question_read_after_the_compression(method, monkeypatch):
    todo = [
        dataclasses.replace(request, compress_at=len(request.prompt_ids) - 7)
        for request in requests(lengths=(19, 45, 60), new_tokens=(40, 20, 35), samples=1)
    ]
    worst, evictions = largest_difference(
        build("qwen3"), method, budget=24, interval=8, slots=2, todo=todo, monkeypatch=monkeypatch
    )
    assert evictions >= 2
    assert worst < 1e-4


def test_oracle_notices_a_wrong_position(monkeypatch):
    """The oracle is only worth something if a mistake shows: shift one kept position."""
    loaded = build("qwen3")
    history = KeptHistory()
    original = KeptHistory.__call__

    def shifted(kept):
        return [(head - 1).clamp(min=0) for head in kept]

    monkeypatch.setattr(
        KeptHistory, "__call__", lambda self, k, s, layer, kept: original(self, k, s, layer, shifted(kept))
    )
    method = registry.methods.get("knorm")()
    engine = Engine(loaded, method, budget=24, interval=8, slots=1, max_tokens=160, log=history)
    [todo] = requests(lengths=(45,), new_tokens=(20,), samples=1)
    [done] = engine.generate([todo])
    ids = [*todo.prompt_ids, *done.token_ids[:-1]]
    dense = dense_logits(loaded, ids, history, [noise.signed64(todo.noise_key(-1)), noise.signed64(todo.noise_key(0))])
    assert dense[44:].argmax(-1).tolist() != list(done.token_ids)
    assert torch.isfinite(dense).all()
