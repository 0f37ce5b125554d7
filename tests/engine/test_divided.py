"""A model that is divided among two GPUs gives the tokens of the undivided model.

The GPUs are pretended: they have the CPU's arithmetic, and raise where tensors of two devices meet. No test sees real
copies between GPUs. Decode steps use PyTorch's operations; `on_current` stands for Triton, which launches on the
current device only.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.methods import small, with_tables
from support.models import build, divided, requests
from support.pretend_cuda import pretended_cuda

from kvbench import EvictionCache
from kvbench.engine import steps
from kvbench.engine.loop import Engine
from kvbench.engine.model.division import divide
from kvbench.engine.model.own_attention import own_attention
from kvbench.engine.model.shape import read_shape, shape_of_model
from kvbench.engine.plan import Machine, plan_cell
from kvbench.errors import SetupError, UserError

REQUESTS = requests(lengths=(29, 12), new_tokens=(5, 4), samples=1)


@pytest.fixture
def gpus():
    with pretended_cuda(devices=2) as device:
        yield device


def generated(loaded, method, layout="auto"):
    made = small(method)
    engine = Engine(
        loaded,
        made,
        budget=24 if made.takes_budget else None,
        interval=3,
        slots=2,
        max_tokens=40,
        layout=layout,
        backend="torch",
    )
    answers = {done.request.doc_id: done for done in engine.generate(REQUESTS)}
    assert made.evicts == any(done.usage.evictions for done in answers.values())
    return {name: (done.token_ids, held(done.usage)) for name, done in answers.items()}, engine


def held(usage):
    return usage.entries_after_evict, usage.entries_peak, usage.kv_bytes_peak, usage.evictions


@pytest.mark.parametrize(
    ("name", "method", "layout"),
    [
        ("qwen3", "full", "dense"),
        ("qwen3", "gkv", "dense"),  # layer by layer
        ("qwen3", "gkv", "paged"),
        ("qwen3", "retention", "auto"),  # one budget for all layers and heads; weights
        ("qwen3", "duo", "auto"),  # the heads of all layers are ranked
        ("qwen3", "cake", "auto"),  # shares of layers follow their scores
        ("qwen3", "lookaheadkv", "auto"),  # probes, read under an adapter
        ("gemma2", "ada-kv", "auto"),  # sliding windows
        ("gemma3n", "gkv", "dense"),  # layers that share the entries of a layer on the other device
        ("gemma3n", "gkv", "paged"),
        ("lfm2", "snapkv-decode", "auto"),  # states of recurrent layers
        ("deepseek-v3", "gkv", "dense"),  # latents
        ("deepseek-v3.2", "tova", "dense"),  # an indexer chooses among the entries
        ("glm-5", "tova", "paged"),  # a layer uses the indexer of a layer on the other device
    ],
)
def test_tokens_are_those_of_the_undivided_model(name, method, layout, monkeypatch):
    want, _ = generated(with_tables(build(name)), method, layout)
    with pretended_cuda(devices=2):
        monkeypatch.setattr(steps, "decode_with", lambda *chosen, made=steps.decode_with: on_current(made(*chosen)))
        got, engine = generated(with_tables(divided(name)), method, layout)
        assert got == want
        assert engine.decoding == "torch"  # without graph and compiled layers
        places = engine.loaded.model.hf_device_map
        assert len(set(places.values())) == 2
        for layer in engine.cache.layers:
            keys = getattr(layer, "pool", layer).keys
            assert keys.device == places[f"model.layers.{layer.geometry.index}"]


def on_current(decode):
    def called(query, *tensors, **more):
        assert torch.cuda.current_device() == query.device.index
        return decode(query, *tensors, **more)

    return called


def test_every_parameter_and_layer_has_one_place(gpus):
    loaded, shape = divided("qwen3"), read_shape(build("qwen3").model.config)
    division = divide(loaded.model.config, "auto", "cuda", torch.float32)
    assert {str(part.device): set(part.layers) for part in division.parts} == {"cuda:0": {0, 1}, "cuda:1": {2}}
    assert sum(part.parameters for part in division.parts) == shape.parameters
    assert shape_of_model(loaded.model).parts == division.parts
    assert "2 on cuda:0, 1 on cuda:1" in division.line()


def test_the_plan_fits_the_fullest_gpu(gpus):
    shape = read_shape(build("qwen3").model.config)
    division = divide(build("qwen3").model.config, "auto", "auto", torch.float32)

    def planned(shape, memory):
        parts = tuple(dataclasses.replace(part, memory=memory) for part in shape.parts)
        return plan_cell(
            dataclasses.replace(shape, parts=parts),
            Machine(bandwidth=1e12, flops=1e14, memory=memory),
            small("full"),
            budget=None,
            interval=8,
            sequences=500,
            max_tokens=2000,
            slots="auto",
            device=torch.device("cuda"),
            dtype=torch.float32,
        )

    memory = 300 << 20
    whole, parts = planned(shape, memory), planned(dataclasses.replace(shape, parts=division.parts), memory)
    assert whole.slot_bytes == parts.slot_bytes
    assert whole.slots < parts.slots < 2 * whole.slots  # two of three layers are on one GPU
    assert parts.peak_bytes <= 0.92 * memory
    assert "on the fullest of 2 GPUs" in parts.line()
    assert "GPUs" not in whole.line()


def test_rope_is_on_the_gpu_of_the_layer_that_reads_it(gpus):
    loaded = divided("qwen3")
    modules = own_attention(loaded.model, loaded.geometry, ["Qwen3Attention"])
    for g in loaded.geometry:
        like = torch.zeros(1, 4, 8, device=g.device)
        tables = modules[g.index].rotary(like, torch.arange(4, device=g.device)[None])
        assert {table.device for table in tables} == {modules[g.index].module.q_proj.weight.device}


def test_one_visible_gpu_needs_no_division():
    with pretended_cuda():
        assert divide(build("qwen3").model.config, "auto", "auto", torch.float32) is None


@pytest.mark.parametrize(
    ("error", "words", "memory", "device"),
    [
        (UserError, "--device cuda:1 only one", 1 << 30, "cuda:1"),
        (SetupError, "this run uses no GPU", 1 << 30, "cpu"),
        (SetupError, "do not fit into 75% of the memory of 2 GPUs", 1 << 18, "auto"),
    ],
)
def test_what_cannot_be_divided_is_refused(error, words, memory, device):
    config = build("qwen3").model.config
    with pretended_cuda(memory=memory, devices=2), pytest.raises(error, match=words):
        divide(config, "auto", device, torch.float32)


def test_without_a_gpu_nothing_is_divided():
    with pytest.raises(SetupError, match="this run uses no GPU"):
        divide(build("qwen3").model.config, "auto", "auto", torch.float32)


def test_padded_rows_of_a_cache_for_generate():
    """A layer on one GPU attends to the entries of a layer on the other."""
    ids = torch.tensor([[0] * 5 + [*range(5, 30)], [*range(3, 33)]])
    mask = (ids > 0).long()
    found = []
    for made, where in ((build, "cpu"), (divided, "cuda:0")):
        with pretended_cuda(devices=2):
            model = made("gemma3n").model
            cache = EvictionCache(model, small("gkv"), budget=24, interval=2, max_tokens=40)
            given = {"attention_mask": mask.to(where), "past_key_values": cache, "pad_token_id": 0}
            out = model.generate(ids.to(where), **given, max_new_tokens=5, do_sample=False)
            found.append(out.tolist())
    assert found[0] == found[1]
