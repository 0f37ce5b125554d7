"""The same engine on a GPU: tokens of the CPU, the dense reference, bit equality in any slot."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from support.methods import EVICTING, VARIANTS, small, with_tables
from support.models import build, requests

from kvbench.engine.attention.grouped import causal_bias, grouped_attention
from kvbench.engine.attention.sdpa import newest_rows
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import prepare
from kvbench.engine.reference import KeptHistory, dense_logits
from kvbench.eviction import noise
from kvbench.records import Sampling

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
TODO = {"lengths": (9, 60, 33, 5, 100), "new_tokens": (70, 50, 90, 40, 30)}


@functools.cache
def on_cpu(architecture="qwen3"):
    return with_tables(build(architecture))


@functools.cache  # torch compiles the layers of every model anew
def on_gpu(architecture="qwen3", dtype=torch.float32):
    loaded = build(architecture)
    return with_tables(prepare(loaded.model.to("cuda", dtype), loaded.tokenizer))


def tokens(loaded, todo, method="gkv", **more):
    instance = small(method)
    budget = 24 if instance.takes_budget else None
    engine = Engine(loaded, instance, budget=budget, interval=8, slots=4, max_tokens=200, **more)
    return {(d.request.doc_id, d.sample): d for d in engine.generate(todo)}


@pytest.mark.parametrize("method", ["full", *EVICTING, *VARIANTS])
def test_greedy_tokens_are_those_of_the_cpu(method):
    architecture = "llama" if method == "knorm" else "qwen3"  # normed keys of a random model are equally long
    todo = requests(**TODO, samples=1, sampling=Sampling())
    cpu = tokens(on_cpu(architecture), todo, method)
    gpu = tokens(on_gpu(architecture), todo, method, compiled=False)  # a later test compiles the layers
    assert {k: d.token_ids for k, d in gpu.items()} == {k: d.token_ids for k, d in cpu.items()}


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "gpt-oss", "qwen2-sliding"])
def test_logits_are_those_of_the_dense_reference(architecture):
    loaded, history = on_gpu(architecture), KeptHistory()
    for done in tokens(loaded, requests(**TODO, samples=1, sampling=Sampling()), log=history).values():
        request = done.request
        keys = [noise.signed64(request.noise_key(sample)) for sample in (-1, done.sample)]
        dense = dense_logits(loaded, [*request.prompt_ids, *done.token_ids[:-1]], history, keys)
        assert dense[len(request.prompt_ids) - 1 :].argmax(-1).tolist() == list(done.token_ids)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("t", [1, 16, 100])
def test_blocks_of_a_prompt_attend_as_on_the_cpu(t, dtype, bound):
    generator = torch.Generator().manual_seed(t)
    query, keys, values = (torch.randn(2, h, n, 64, generator=generator) for h, n in ((8, t), (2, 1000), (2, 1000)))
    causal = causal_bias(torch.arange(1000 - t, 1000), torch.arange(1000), None, torch.float32)[None, None]
    ragged = causal.repeat(2, 2, 1, 1)
    ragged[:, 1, :, 100:200] = float("-inf")
    for bias, on_gpu_bias in ((causal, newest_rows(t, 1000)), (causal, causal), (ragged, ragged)):
        want = grouped_attention(query, keys, values, bias, scaling=0.2)
        moved = (x.to("cuda", dtype) for x in (query, keys, values))
        mask = on_gpu_bias.to("cuda", dtype) if on_gpu_bias is bias else on_gpu_bias
        got = grouped_attention(*moved, mask, scaling=0.2).float().cpu()
        torch.testing.assert_close(got, want, atol=bound, rtol=bound)


@pytest.mark.parametrize("method", ["gkv", "h2o", "knorm"])
def test_both_layouts_give_the_same_tokens(method):
    loaded, todo = on_gpu(), requests(**TODO, samples=1, sampling=Sampling())
    dense, paged = (tokens(loaded, todo, method, layout=layout) for layout in ("dense", "paged"))
    assert {k: d.token_ids for k, d in dense.items()} == {k: d.token_ids for k, d in paged.items()}


@pytest.mark.parametrize("method", ["full", "gkv", "trimkv", "ada-kv while decoding"])
def test_every_way_to_decode_gives_the_same_tokens(method):
    """Greedy, float32: with and without graph and compiled layers, by the kernel and by PyTorch's operations."""
    loaded, todo = on_gpu(), requests(**TODO, samples=1, sampling=Sampling())
    ways = ({}, {"graph": False}, {"compiled": False}, {"backend": "torch", "compiled": False, "graph": False})
    first, *others = ({k: d.token_ids for k, d in tokens(loaded, todo, method, **way).items()} for way in ways)
    assert all(other == first for other in others)


@pytest.mark.parametrize("method", ["gkv", "ada-kv", "expected-attention"])
def test_prompts_evicted_chunk_by_chunk(method):
    todo = requests(**TODO, samples=1, sampling=Sampling())
    chunks = {"prefill": "chunked", "prefill_chunk": 16, "compiled": False}  # prompts are not read by compiled layers
    cpu, gpu = (tokens(model, todo, method, **chunks) for model in (on_cpu(), on_gpu()))
    assert {k: d.token_ids for k, d in gpu.items()} == {k: d.token_ids for k, d in cpu.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_do_not_depend_on_neighbours_or_slots(dtype):
    loaded, todo = on_gpu(dtype=dtype), requests(**TODO, samples=2)
    together = {k: d.token_ids for k, d in tokens(loaded, todo).items()}
    for seed in range(3):
        again = tokens(loaded, random.Random(seed).sample(todo, len(todo)))
        assert {k: d.token_ids for k, d in again.items()} == together
