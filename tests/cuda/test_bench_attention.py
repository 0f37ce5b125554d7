"""`bench` on a GPU times the backends of a decode step's attention: on calls of a real step, which it leaves as it was.

Speeds of the pretended device say nothing; compiled Triton kernels and flash-attention cannot run there.
"""

from __future__ import annotations

import math

import pytest
from support.methods import small, with_tables
from support.models import build, requests
from support.pretend_cuda import pretended_cuda

from kvbench.engine.cache.dense import DenseCache
from kvbench.engine.kernels.backends import decode_with
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import prepare
from kvbench.runner.bench.attention import AttentionTime, attention_times, fastest, record


@pytest.mark.parametrize(
    ("architecture", "method"),
    [("qwen3", "tova"), ("qwen3", "h2o"), ("qwen3", "ada-kv while decoding"), ("gemma2", "full"), ("gpt-oss", "full")],
)
def test_the_calls_are_those_of_the_next_step(architecture, method):
    """Their bytes are those of the entries held, and the engine generates the same tokens with and without timing."""
    timed: list[tuple[AttentionTime, ...]] = []

    def decoded(on_step):
        made = small(method)
        budget = 20 if made.takes_budget else None
        lengths = dict(budget=budget, interval=5, slots=3, max_tokens=40)
        engine[:] = [Engine(loaded, made, **lengths, backend="torch", compiled=False, on_step=on_step)]
        done = engine[0].generate(requests(lengths=(26, 9, 14), new_tokens=(11, 9, 6), samples=1))
        return {d.request.doc_id: d.token_ids for d in done}

    def time(*_):
        [now] = engine
        calls = record(now)
        assert sum(call.bytes() for call in calls) == _bytes(now)
        if not timed:
            timed.append(attention_times(now, 1e9))
            assert [decode_with("torch", now.cache)(*c.tensors, **c.options).shape[0] for c in calls] == [3] * 3

    engine: list[Engine] = []
    with pretended_cuda():
        model = build(architecture)
        loaded = with_tables(prepare(model.model.to("cuda"), model.tokenizer))
        want = decoded(None)
        assert decoded(time) == want
    [(triton, torch, varlen)] = timed
    assert (torch.backend, fastest([torch, varlen]), fastest([varlen])) == ("torch", "torch", None)
    assert torch.seconds > 0
    assert torch.share > 0
    assert triton.backend == "triton"
    assert (varlen.seconds, varlen.share) == (None, None)
    assert "varlen does not support" in varlen.refused


def _bytes(engine: Engine) -> int:
    """Bytes of the entries that the next step of every sequence reads and writes, by the host's counts."""
    cache, total = engine.cache, 0
    rows = cache.shape.rows if isinstance(cache, DenseCache) else math.inf  # pages have room for more
    for layer in cache.layers:
        g = layer.geometry
        entry = g.kv_heads * (g.head_dim + g.value_dim) * 4
        for slot, seen in enumerate(cache.seen):
            if seen and g.window is not None:
                total += min(seen + 1, g.window) * entry
            elif seen:
                total += round(min(cache.held(slot) + 1, rows) * entry)  # a mean over layers and heads
    return total
