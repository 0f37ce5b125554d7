"""The planned bytes of a cell: those of evictions follow the method's own code, and the peak is that of a real run."""

from __future__ import annotations

import dataclasses
from itertools import accumulate

import pytest
import torch
import transformers
from support.methods import small, with_tables
from support.models import Words, build, requests
from torch.autograd.profiler import profile

from kvbench.engine.cache.layout import Lengths, fit, shape_of
from kvbench.engine.cache.stack import scratch_bytes
from kvbench.engine.footprint import footprint
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import prepare
from kvbench.engine.model.shape import shape_of_model
from kvbench.engine.plan import Machine, plan_cell

SCRATCH = 2_000_000


def planned(name, **changes):
    loaded, method = build("qwen3"), small(name)
    shape = shape_of_model(loaded.model)
    geometry = fit(shape.geometry, method, 200)
    held = shape_of(shape.geometry, method, 24, 8, Lengths.of(200), 1)
    sizes = dict(prompt_rows=200, budget=24, interval=8, block=64, prefill="full", at_once=SCRATCH, gpu=False)
    return footprint(shape, geometry, method, held, torch.float32, **sizes | changes)


@pytest.mark.parametrize("name", ["gkv", "retention"])  # decides layer by layer; about all layers together
def test_a_view_bounds_the_scratch_of_an_eviction(name):
    ticks = planned(name).ticks
    assert 0 < ticks.at(1) < ticks.at(2) < ticks.at(1000) == ticks.at(2000) < 2 * SCRATCH


def test_a_gpu_takes_larger_blocks():
    assert planned("gkv", prompt_rows=4000).prompt < planned("gkv", prompt_rows=4000, gpu=True).prompt


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("name", ["full", "gkv", "retention"])
def test_as_many_slots_fit_as_the_plan_needs_no_more_memory_for(name, gpu):
    need = dataclasses.replace(planned(name, gpu=gpu), prompt=0)
    for usable in range(need.at(1), need.at(60), 9_973):
        slots = need.fitting(usable)
        assert need.at(slots) <= usable < need.at(slots + 1)


def test_a_small_device_has_less_scratch():
    cuda = torch.device("cuda")
    assert [scratch_bytes(cuda, memory << 30) for memory in (16, 24, 80, 141)] == [
        512 << 20,
        768 << 20,
        2 << 30,
        2 << 30,
    ]


WIDE = dict(hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4)
PROMPT, NEW, SLOTS, BUDGET, INTERVAL = 300, 40, 6, 64, 16


@pytest.fixture(scope="module")
def wide():
    """A model in whose runs the cache and the weights weigh more than single operators."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**WIDE, head_dim=32, vocab_size=1000, tie_word_embeddings=True)
    return with_tables(prepare(transformers.AutoModelForCausalLM.from_config(config).eval(), Words()))


def measured(loaded, method):
    """Return the most bytes that torch allocates in a run of all slots, beside the model's weights."""
    engine = dict(budget=BUDGET if method.takes_budget else None, interval=INTERVAL, slots=SLOTS)
    with profile(profile_memory=True) as record:
        made = Engine(loaded, method, **engine, max_tokens=PROMPT + NEW, max_output=NEW, prefill_chunk=128)
        list(made.generate(requests(lengths=(PROMPT,) * SLOTS, new_tokens=(NEW,) * SLOTS, samples=1)))
    events = sorted(record.kineto_results.events(), key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


@pytest.mark.parametrize("name", ["full", "gkv", "snapkv", "h2o", "duo", "kvzip", "retention", "lookaheadkv"])
def test_the_planned_peak_is_within_5_percent_of_the_measured_one(wide, name):
    method = small(name)
    shape, cpu = shape_of_model(wide.model), torch.device("cpu")
    plan = plan_cell(
        shape,
        Machine(bandwidth=1e10, flops=1e10, memory=1 << 34),
        method,
        budget=BUDGET if method.takes_budget else None,
        interval=INTERVAL,
        sequences=SLOTS,
        slots=SLOTS,
        device=cpu,
        dtype=torch.float32,
        max_tokens=PROMPT + NEW,
        max_output=NEW,
        max_prompt=PROMPT,
        prefill_chunk=128,
    )
    weights = shape.weight_bytes(4)
    assert plan.peak_bytes == pytest.approx(weights + measured(wide, method), rel=0.05)
