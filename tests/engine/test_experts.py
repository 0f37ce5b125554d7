"""Mixtures of experts on a CPU: a sequence's bits do not depend on the sequences beside it."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from support.models import ARCHITECTURES, build, requests

from kvbench.engine import loop
from kvbench.engine.loop import Engine
from kvbench.engine.model.experts import filled_experts
from kvbench.eviction.choose import make

LATENT = dict(ARCHITECTURES["deepseek-v3"][1], first_k_dense_replace=1, moe_intermediate_size=32)
MORE = {
    "mixtral": ("MixtralConfig", dict(num_local_experts=4, num_experts_per_tok=2)),
    "deepseek-v3": (
        "DeepseekV3Config",
        dict(LATENT, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1),
    ),
}


def log_probs(loaded, todo):
    """Each sequence's log-probabilities of given tokens, which show differences in the last bits."""
    engine = Engine(loaded, make("gkv", {"window": 8}), budget=24, interval=8, slots=4, max_tokens=100)
    return {done.request.doc_id: done.log_probs for done in engine.generate(todo)}


def forced():
    found = requests(lengths=(9, 40, 33, 5), new_tokens=(20,) * 4, samples=1)
    return [dataclasses.replace(request, forced=tuple(range(5, 25))) for request in found]


@pytest.mark.parametrize(
    ("architecture", "threads"),
    [("qwen3-moe", 1), ("gpt-oss", 1), ("mixtral", 1), ("deepseek-v3", 1), ("qwen3-moe", 2)],
)
def test_bits_are_equal_alone_and_beside_neighbours(architecture, threads, monkeypatch):
    if architecture in MORE:
        monkeypatch.setitem(ARCHITECTURES, architecture, MORE[architecture])
    loaded, todo = build(architecture), forced()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = log_probs(loaded, todo)
        for request in todo[:2]:
            assert log_probs(loaded, [request])[request.doc_id] == together[request.doc_id]
    finally:
        torch.set_num_threads(before)


def test_filling_changes_no_more_than_last_bits(monkeypatch):
    loaded, todo = build("qwen3-moe"), forced()
    filled = log_probs(loaded, todo)
    monkeypatch.setattr(loop, "filled_experts", lambda model, slots: contextlib.nullcontext())
    plain = log_probs(loaded, todo)
    assert filled != plain
    for name, values in plain.items():
        assert values == pytest.approx(filled[name], abs=1e-4)


def test_other_models_stay_as_they_are():
    for loaded, slots in ((build("qwen3"), 4), (build("qwen3-moe"), 1)):
        with filled_experts(loaded.model, slots) as count:
            assert count == 0
    with filled_experts(build("qwen3-moe").model.bfloat16(), 4) as count:
        assert count == 0
