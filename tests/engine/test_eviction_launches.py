"""Evictions on the pretended device: launches do not grow with the layers, and the host waits at most twice."""

from __future__ import annotations

import gc

import pytest
import torch
import transformers
from support.methods import small, with_tables
from support.models import requests
from support.pretend_cuda import pretended_cuda

from kvbench.engine.evict import Evictor
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import prepare
from kvbench.records import Sampling

DENSE = ["knorm", "keydiff", "random", "streaming-llm", "tova", "snapkv-decode", "morphkv", "rpc", "h2o", "trimkv"]
DENSE += ["expected-attention", "foresightkv", "gkv", "rkv"]
PAGED = ["ada-kv while decoding", "retention by layer"]
CASES = [*((name, "dense") for name in DENSE), ("gkv", "paged"), *((name, "paged") for name in PAGED)]
TODO = dict(lengths=(40, 40, 40), new_tokens=(18, 18, 18), samples=1, sampling=Sampling())


def model(layers: int) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    sizes = dict(vocab_size=160, hidden_size=32, intermediate_size=32, head_dim=8, num_hidden_layers=layers)
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    config = transformers.Qwen3Config(**sizes, **heads, max_position_embeddings=512, eos_token_id=None, pad_token_id=0)
    return transformers.Qwen3ForCausalLM(config).eval()


def ticks(layers: int, name: str, layout: str = "auto", slots: int = 3):
    """Return the counts of the evictions, and the tokens on the pretended device and on the CPU."""
    loaded = with_tables(prepare(model(layers), None))
    method, todo = small(name), requests(**TODO)

    def tokens(loaded):
        engine = Engine(loaded, method, budget=24, interval=8, slots=slots, max_tokens=80, layout=layout)
        return {d.request.doc_id: d.token_ids for d in engine.generate(todo)}

    wanted = tokens(loaded)
    with pretended_cuda() as device:
        cuda = with_tables(prepare(model(layers).to("cuda"), None))
        counts = device.watch(Evictor, "tick")
        got = tokens(cuda)
        report = device.report()
    gc.collect()
    assert len(counts) == 2
    return counts, got, wanted, report


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_an_eviction_launches_as_much_for_six_layers_as_for_three(name, layout):
    few, got, wanted, _ = ticks(3, name, layout)
    assert got == wanted
    many, got, wanted, report = ticks(6, name, layout)
    assert got == wanted
    assert max(count.syncs for count in many) <= 2, report
    if name in PAGED:  # heads hold unequal numbers: one view per number
        assert many[-1].launches < 1.7 * few[-1].launches
    else:
        assert many[-1].launches == few[-1].launches, report


@pytest.mark.parametrize("name", ["retention", "duo"])
def test_the_host_waits_twice_however_many_layers_decide_together(name):
    counts, got, wanted, report = ticks(4, name)
    assert got == wanted
    assert max(count.syncs for count in counts) <= 2, report
