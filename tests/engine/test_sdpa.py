"""Attention of blocks: the forms for CPU and CUDA against plain arithmetic, and what they do not allocate."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.methods import small
from support.models import build, requests
from support.pretend_cuda import pretended_cuda

from kvbench.engine.attention.grouped import causal_bias, grouped_attention
from kvbench.engine.attention.sdpa import newest_rows
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import prepare
from kvbench.records import Sampling

B, HK, D, DV, N = 2, 2, 8, 8, 37
SCALE = 0.3


def by_hand(query, keys, values, bias, softcap=None, sinks=None):
    """One query at a time in float64."""
    b, hq, t, _ = query.shape
    g = hq // keys.shape[1]
    bias = torch.zeros(1, 1, t, keys.shape[2]) if bias is None else bias
    bias = bias.expand(b, keys.shape[1], t, keys.shape[2])
    out = torch.empty(b, t, hq, values.shape[-1], dtype=torch.float64)
    for i, h, j in itertools.product(range(b), range(hq), range(t)):
        logits = keys[i, h // g].double() @ query[i, h, j].double() * SCALE
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits + bias[i, h // g, j]
        if sinks is not None:
            logits = torch.cat([logits, sinks[h, None].double()])
        out[i, j, h] = logits.softmax(0)[: keys.shape[2]] @ values[i, h // g].double()
    return out


def inputs(g, t):
    torch.manual_seed(g * 100 + t)
    draw = torch.randn
    return draw(B, HK * g, t, D), draw(B, HK, N + 3, D)[:, :, :N], draw(B, HK, N + 3, DV)[:, :, :N]


def masks(t):
    """Masks of every shape that may be broadcast; no query is left without a row."""
    for shape in ((1, 1), (B, 1), (1, HK), (B, HK)):
        bias = torch.zeros(*shape, t, N).masked_fill_(torch.rand(*shape, t, N) < 0.4, float("-inf"))
        bias[..., 0] = 0
        yield bias


@pytest.mark.parametrize("g", [1, 3])
@pytest.mark.parametrize("t", [1, 5])
@pytest.mark.parametrize("extra", [{}, {"softcap": 2.0}, {"sinks": True}])
def test_every_mask_on_cpu_and_cuda(g, t, extra):
    query, keys, values = inputs(g, t)
    extra = {"sinks": torch.randn(HK * g)} if "sinks" in extra else extra
    for bias in (None, *masks(t)):
        want = by_hand(query, keys, values, bias, **extra)
        cpu = grouped_attention(query, keys, values, bias, scaling=SCALE, **extra)
        torch.testing.assert_close(cpu.double(), want, atol=2e-6, rtol=0)
        with pretended_cuda(), torch.inference_mode():
            moved = [None if x is None else x.to("cuda") for x in (query, keys, values, bias)]
            sinks = {name: x.to("cuda") if isinstance(x, torch.Tensor) else x for name, x in extra.items()}
            cuda = grouped_attention(*moved, scaling=SCALE, **sinks).cpu()
        torch.testing.assert_close(cuda, cpu, atol=1e-6, rtol=0)


@pytest.mark.parametrize("t", [1, 5, N])
def test_a_causal_block_needs_no_mask_on_cuda(t):
    query, keys, values = inputs(3, t)
    bias = causal_bias(torch.arange(N - t, N), torch.arange(N), None, torch.float32)[None, None]
    cpu = grouped_attention(query, keys, values, bias, scaling=SCALE)
    with pretended_cuda(), torch.inference_mode():
        moved = [x.to("cuda") for x in (query, keys, values)]
        cuda = grouped_attention(*moved, newest_rows(t, N), scaling=SCALE).cpu()
    torch.testing.assert_close(cuda, cpu, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("g", "bias"), [(4, "causal"), (4, "dense")])
def test_cuda_repeats_neither_mask_nor_entries(g, bias):
    """Beside the queries (also as rows) and the output, a block allocates nothing that grows with heads times rows."""
    t, n = 16, 4096
    with pretended_cuda() as device, torch.inference_mode():
        query, keys = torch.zeros(1, HK * g, t, D, device="cuda"), torch.zeros(1, HK, n, D, device="cuda")
        mask = newest_rows(t, t) if bias == "causal" else torch.zeros(1, 1, t, n, device="cuda")
        if bias == "causal":
            keys = keys[:, :, :t]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grouped_attention(query, keys, keys, mask, scaling=1.0)
        assert torch.cuda.max_memory_allocated() - before <= 3 * query.nbytes
        assert device.total.syncs == 0


@pytest.mark.parametrize(
    ("architecture", "method", "prefill"),
    [
        ("qwen3", "full", "full"),
        ("qwen3", "gkv", "full"),
        ("qwen3", "knorm", "chunked"),  # heads hold equally many rows, but not all
        ("qwen3", "kvzip", "full"),  # heads hold unequal numbers of rows
        ("mistral-sliding", "full", "chunked"),
        ("gemma2", "full", "full"),  # softcap
        ("gpt-oss", "full", "full"),  # sinks
    ],
)
def test_tokens_after_passes_of_eight_chunks_on_cuda_are_those_of_the_cpu(architecture, method, prefill):
    todo = requests(lengths=(9, 150, 33), new_tokens=(6, 6, 6), samples=1, sampling=Sampling())

    def tokens(loaded):
        budget = 24 if small(method).takes_budget else None
        plain = {"backend": "torch", "compiled": False}  # the subject is the prompt
        settings = {"slots": 2, "max_tokens": 160, "prefill_chunk": 16, "prefill": prefill} | plain
        engine = Engine(loaded, small(method), budget=budget, interval=8, **settings)
        return {done.request.doc_id: done.token_ids for done in engine.generate(todo)}

    want = tokens(build(architecture))
    with pretended_cuda():
        loaded = build(architecture)
        assert tokens(prepare(loaded.model.to("cuda"), loaded.tokenizer)) == want


@pytest.mark.parametrize(("method", "prefill", "passes"), [("full", "full", 2), ("snapkv", "chunked", 10)])
def test_on_cuda_a_pass_without_eviction_reads_eight_chunks(method, prefill, passes):
    [request] = requests(lengths=(150,), new_tokens=(1,), samples=1, sampling=Sampling())
    with pretended_cuda():
        model = build("qwen3")
        loaded, read = prepare(model.model.to("cuda"), model.tokenizer), list[int]()
        loaded.model.model.register_forward_pre_hook(
            lambda module, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        budget = 24 if small(method).takes_budget else None
        sizes = dict(slots=1, max_tokens=160, prefill_chunk=16, prefill=prefill, compiled=False, backend="torch")
        list(Engine(loaded, small(method), budget=budget, interval=8, **sizes).generate([request]))
    assert (len(read), sum(read)) == (passes, 150)
