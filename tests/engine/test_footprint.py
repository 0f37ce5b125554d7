"""The planned bytes of an eviction follow the layers that one view shows, and stop at the scratch of a view."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.methods import small
from support.models import build

from kvbench.engine.cache.layout import Lengths, fit, shape_of
from kvbench.engine.cache.stack import scratch_bytes
from kvbench.engine.footprint import footprint
from kvbench.engine.model.shape import shape_of_model

SCRATCH = 200_000


def planned(name):
    loaded, method = build("qwen3"), small(name)
    shape = shape_of_model(loaded.model)
    geometry = fit(shape.geometry, method, 200)
    held = shape_of(shape.geometry, method, 24, 8, Lengths.of(200), 1)
    sizes = dict(prompt_rows=200, block=64, prefill="full", scratch=SCRATCH)
    return footprint(shape, geometry, method, held, torch.float32, **sizes)


def test_a_stacked_method_takes_all_layers_at_once_up_to_the_scratch_of_a_view():
    stacked, single = planned("gkv"), planned("retention")
    assert stacked.evict == 3 * single.evict > 0
    assert stacked.evict_most == SCRATCH < single.evict_most
    evictions = dataclasses.replace(stacked, weights=0, slot=0, step=0, prompt=0, evict_fixed=0)
    assert [evictions.at(n) for n in (1, 2, 1000)] == [stacked.evict, 2 * stacked.evict, SCRATCH]


def test_products_with_the_output_projection_are_counted():
    """Beside them, the prompt of criticalkv differs from its base's in a column of 4 bytes per entry."""
    columns = 2 * 200 * 3 * 2 * 4  # two copies, 200 tokens, 3 layers, 2 KV heads
    assert planned("criticalkv").prompt > planned("snapkv").prompt + columns


@pytest.mark.parametrize("name", ["full", "gkv", "retention"])
def test_as_many_slots_fit_as_the_plan_needs_no_more_memory_for(name):
    need = dataclasses.replace(planned(name), prompt=0)
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
