"""Evictions on the pretended device: launches of a tick do not grow with the layers, and the host waits once per tick
and once per prompt."""

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
from kvbench.engine.prefill import PromptReader
from kvbench.eviction import select
from kvbench.eviction.view import StackView
from kvbench.records import Sampling

DENSE = ["knorm", "keydiff", "random", "streaming-llm", "tova", "snapkv-decode", "morphkv", "rpc", "h2o", "trimkv"]
DENSE += ["expected-attention", "foresightkv", "gkv", "rkv"]
JOINT = ["retention", "duo"]  # decide about all layers together, so heads hold unequal numbers
CASES = [*((name, "dense") for name in DENSE), ("gkv", "paged"), *((name, "paged") for name in JOINT)]
TODO = dict(lengths=(40, 40, 40), new_tokens=(18, 18, 18), samples=1, sampling=Sampling())


def model(layers: int) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    sizes = dict(vocab_size=160, hidden_size=32, intermediate_size=32, head_dim=8, num_hidden_layers=layers)
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    config = transformers.Qwen3Config(**sizes, **heads, max_position_embeddings=512, eos_token_id=None, pad_token_id=0)
    return transformers.Qwen3ForCausalLM(config).eval()


def ticks(layers: int, name: str, layout: str = "auto", slots: int = 3):
    """Return the counts of the evictions on the pretended device, and how many views decided.

    Checks that the tokens are those of the CPU, and that no eviction makes the host wait more than once.
    """
    loaded = with_tables(prepare(model(layers), None))
    method, todo = small(name), requests(**TODO)

    def tokens(loaded):
        plain = {"backend": "torch", "compiled": False}
        engine = Engine(loaded, method, budget=24, interval=8, slots=slots, max_tokens=80, layout=layout, **plain)
        return {d.request.doc_id: d.token_ids for d in engine.generate(todo)}

    wanted, views = tokens(loaded), []
    with pretended_cuda() as device, pytest.MonkeyPatch.context() as patch:
        cuda = with_tables(prepare(model(layers).to("cuda"), None))
        patch.setattr(select, "decide", lambda *args, inner=select.decide: views.append(args[1]) or inner(*args))
        counts = device.watch(Evictor, "tick")
        got = tokens(cuda)
        report = device.report()
    gc.collect()
    assert len(counts) == 2
    assert got == wanted
    assert max(count.syncs for count in counts) <= 1, report
    shown = sum(len(of) for of in views if len(of[0].seen) > 1 or isinstance(of[0], StackView))  # no prompt's
    return counts, shown


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_an_eviction_launches_as_much_for_six_layers_as_for_three(name, layout):
    (few, _), (many, _) = ticks(3, name, layout), ticks(6, name, layout)
    assert many[-1].launches == few[-1].launches


@pytest.mark.parametrize("name", ["ada-kv while decoding", "retention by layer"])
def test_heads_that_hold_unequal_numbers_take_one_view_per_number(name):
    """Each view launches as much whatever the layers; numbers are padded to pages, so there are only so many."""
    (few, some), (many, more) = ticks(3, name), ticks(6, name)
    assert more <= 2 * 6  # at most 6 padded sizes of up to 24 + 8 entries in 2 evictions
    assert sum(c.launches for c in many) / more < 1.3 * sum(c.launches for c in few) / some


def prompts(name: str, layers: int, **more):
    """Return the counts of reading each of three prompts on the pretended device, and a report of what they waited for.

    Checks that the tokens are those of the CPU.
    """
    method, todo = small(name), requests(**TODO)

    def tokens(loaded):
        plain = {"backend": "torch", "compiled": False, **more}
        engine = Engine(loaded, method, budget=24, interval=8, slots=3, max_tokens=80, **plain)
        return {d.request.doc_id: d.token_ids for d in engine.generate(todo)}

    wanted = tokens(with_tables(prepare(model(layers), None)))
    with pretended_cuda() as device:
        cuda = with_tables(prepare(model(layers).to("cuda"), None))
        counts = device.watch(PromptReader, "read")
        got, report = tokens(cuda), device.report()
    gc.collect()
    assert len(counts) == 3
    assert got == wanted
    return counts, report


@pytest.mark.parametrize(
    ("name", "syncs"),
    [("full", 0), *((name, 1) for name in ("tova", "h2o", "gkv", "snapkv", "retention")), ("ada-kv", 6)],
)
def test_the_host_waits_once_for_a_prompt_or_for_each_layer_with_uneven_heads(name, syncs):
    """A layer whose heads keep unequal numbers is shortened to the longest head, which only the device knows."""
    counts, report = prompts(name, layers=6)
    assert [(count.syncs, count.waits) for count in counts] == [(syncs, 1)] * 3, report  # 1 wait: the timer at the end


@pytest.mark.parametrize(("name", "syncs"), [("tova", 2), ("h2o", 2), ("retention", 2), ("ada-kv", 2 * 6)])
def test_the_host_waits_once_for_each_chunk_that_is_evicted(name, syncs):
    counts, report = prompts(name, layers=6, prefill="chunked", prefill_chunk=16)  # 16, 32 and 40 tokens; 24 stay
    assert [count.syncs for count in counts] == [syncs] * 3, report


@pytest.mark.parametrize("layers", [3, 6])
def test_copies_to_the_device_for_a_prompt_do_not_grow_with_the_layers(layers):
    counts, report = prompts("tova", layers)
    assert [count.h2d for count in counts] == [2] * 3, report  # its tokens, and the facts that all views share
