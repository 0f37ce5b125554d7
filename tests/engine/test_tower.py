"""The planned bytes of the vision part, against what torch's allocator measures on a CPU."""

from __future__ import annotations

import pytest
import torch
from support import vision, zoo
from support.images import FAMILIES
from torch.profiler import ProfilerActivity, profile

from kvbench.engine.cache.layout import Lengths, fit, shape_of
from kvbench.engine.footprint import footprint
from kvbench.engine.model.shape import read_shape
from kvbench.eviction.choose import make


def measured(read) -> int:
    """Most bytes that the CPU's allocator gives out while `read` runs."""
    with torch.inference_mode():
        read()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            read()
    held = most = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def grids(config, *sizes):
    """What a model with a grid of patches reads of images with so many patches in height and width."""
    part = config.vision_config
    numbers = part.in_channels * part.temporal_patch_size * part.patch_size**2
    grid = torch.tensor([[1, *size] for size in sizes])
    return {"pixel_values": torch.randn(int(grid.prod(-1).sum()), numbers), "image_grid_thw": grid}


@pytest.mark.parametrize("family", ["glm4v", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("sizes", [[(24, 16)], [(32, 24), (16, 16)], [(96, 64)]], ids=["small", "several", "large"])
def test_planned_bytes_are_those_measured(family, sizes):
    read = grids(vision.config(family), *sizes)
    peak, left = read_shape(vision.config(family)).images(read, torch.float32)
    own = sum(value.nbytes for value in read.values())
    model = zoo.build(vision.config(family))
    real = own + measured(lambda: model.model.get_image_features(**read))
    assert peak == pytest.approx(real, rel=0.05)
    assert own < left < peak


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_that_sees_is_planned_without_weights(family):
    config = zoo.configuration(family, FAMILIES[family])
    if hasattr(config.vision_config, "temporal_patch_size"):
        one, many = grids(config, (4, 4)), grids(config, *[(8, 8)] * 8)
    elif family == "llava_onevision":
        one = {"pixel_values": torch.zeros(1, 3, 3, 8, 8), "image_sizes": torch.tensor([[16, 8]])}
        many = {name: torch.cat([value] * 8) for name, value in one.items()}
    else:
        one, many = ({"pixel_values": torch.zeros(n, 3, 8, 8)} for n in (1, 8))
    shape = read_shape(config)
    (few, some), (most, left) = (shape.images(read, torch.bfloat16) for read in (one, many))
    assert 0 < some < few < most
    assert some < left < most


def test_a_plan_holds_the_larger_of_vision_part_and_text():
    shape, method = read_shape(vision.config()), make("full", {})
    geometry = fit(shape.geometry, method, 512)
    held = shape_of(shape.geometry, method, None, 8, Lengths.of(512), 1, shape.states)

    def planned(images):
        sizes = dict(prompt_rows=512, tail=0, budget=None, interval=8, block=512, prefill="full", images=images)
        return footprint(shape, geometry, method, held, torch.float32, **sizes, at_once=1 << 20, gpu=False).prompt

    text, large = planned((0, 0)), 1 << 40
    assert planned((100, 100)) == text + 100
    assert large < planned((large, 100)) < large + text
