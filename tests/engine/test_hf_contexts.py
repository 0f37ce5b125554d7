"""EvictionCache where torch changes what a model does: autocast, inference mode, torch.compile, offloaded weights."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from support.models import build

from kvbench import EvictionCache
from kvbench.errors import UserError

PROMPT = torch.tensor([list(range(5, 45))])


def generate(model, ids, cache, tokens=12):
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": tokens, "do_sample": False}
    return model.generate(ids, past_key_values=cache, **how)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_under_autocast_entries_have_its_dtype(architecture):
    """Under autocast, RoPE makes a float32 model's queries and keys float32, while its values are bfloat16."""
    model = build(architecture).model
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = generate(model, PROMPT, None)
        with EvictionCache(model, "full", max_tokens=100) as cache:
            assert generate(model, PROMPT, cache).tolist() == wanted.tolist()
        assert {cache.slots.layers[0].keys.dtype, cache.slots.layers[0].values.dtype} == {torch.bfloat16}
        for method in ("h2o", "laq"):  # laq lets the model read probes
            with EvictionCache(model, method, budget=36, interval=4, max_tokens=100) as cache:
                generate(model, PROMPT, cache)
    with EvictionCache(model, "full", max_tokens=100) as cache:
        generate(model, PROMPT, cache)
    assert cache.slots.layers[0].keys.dtype == torch.float32


@pytest.mark.parametrize("architecture", ["qwen3", "lfm2"])
@pytest.mark.parametrize("inference", [(1, 1, 0), (0, 1, 0), (0, 0, 1)])
def test_one_cache_inside_and_outside_inference_mode(architecture, inference):
    """inference: whether the cache is made, the prompt read and the second turn read in inference mode."""
    model, texts = build(architecture).model, []
    for inside in (inference, (0, 0, 0)):
        made, first, second = (torch.inference_mode() if each else nullcontext() for each in inside)
        with made:
            cache = EvictionCache(model, "gkv", budget=32, interval=4, max_tokens=100)
        with cache:
            with first:
                ids = generate(model, PROMPT, cache)
            ids = torch.cat([ids, PROMPT[:, :4]], dim=1)
            with second:
                texts.append(generate(model, ids, cache).tolist())
    assert texts[0] == texts[1]


def test_a_model_that_torch_compile_wraps():
    model = build("qwen3").model
    wrapped = torch.compile(model, backend="eager")
    with EvictionCache(model, "tova", budget=16, interval=8, max_tokens=100) as cache:
        wanted = generate(model, PROMPT, cache)
    with EvictionCache(wrapped, "tova", budget=16, interval=8, max_tokens=100) as cache:
        assert generate(wrapped, PROMPT, cache).tolist() == wanted.tolist()
        assert max(cache.entries()) <= 24


def test_a_model_without_its_weights_is_refused():
    with pytest.raises(UserError, match="weights are offloaded or were never loaded"):
        EvictionCache(build("llama").model.to("meta"), "full")
