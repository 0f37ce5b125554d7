"""The same engine on a GPU: tokens of the CPU, the dense reference, bit equality in any slot."""

from __future__ import annotations

import random

import pytest
import torch
from support.models import build, requests

from kvbench import registry
from kvbench.engine.loop import Engine
from kvbench.engine.model import prepare
from kvbench.engine.reference import KeptHistory, dense_logits
from kvbench.eviction import noise
from kvbench.records import Sampling

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
TODO = {"lengths": (9, 60, 33, 5, 100), "new_tokens": (70, 50, 90, 40, 30)}


def on_gpu(architecture="qwen3", dtype=torch.float32):
    loaded = build(architecture)
    return prepare(loaded.model.to("cuda", dtype), loaded.tokenizer)


def tokens(loaded, todo, method="gkv", log=None):
    instance = registry.methods.get(method)()
    budget = 24 if instance.evicts else None
    engine = Engine(loaded, instance, budget=budget, interval=8, slots=4, max_tokens=200, log=log)
    return {(d.request.doc_id, d.sample): d for d in engine.generate(todo)}


@pytest.mark.parametrize("method", registry.methods.names())
def test_greedy_tokens_are_those_of_the_cpu(method):
    todo = requests(**TODO, samples=1, sampling=Sampling())
    cpu, gpu = tokens(build("qwen3"), todo, method), tokens(on_gpu(), todo, method)
    assert {k: d.token_ids for k, d in gpu.items()} == {k: d.token_ids for k, d in cpu.items()}


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "gpt-oss", "mistral-sliding"])
def test_logits_are_those_of_the_dense_reference(architecture):
    loaded, history = on_gpu(architecture), KeptHistory()
    for done in tokens(loaded, requests(**TODO, samples=1, sampling=Sampling()), log=history).values():
        request = done.request
        keys = [noise.signed64(request.noise_key(sample)) for sample in (-1, done.sample)]
        dense = dense_logits(loaded, [*request.prompt_ids, *done.token_ids[:-1]], history, keys)
        assert dense[len(request.prompt_ids) - 1 :].argmax(-1).tolist() == list(done.token_ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_do_not_depend_on_neighbours_or_slots(dtype):
    loaded, todo = on_gpu(dtype=dtype), requests(**TODO, samples=2)
    together = {k: d.token_ids for k, d in tokens(loaded, todo).items()}
    for seed in range(3):
        again = tokens(loaded, random.Random(seed).sample(todo, len(todo)))
        assert {k: d.token_ids for k, d in again.items()} == together
