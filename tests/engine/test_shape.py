"""Shapes of models without their weights, and what is refused because it cannot be served rightly."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import transformers
from support import zoo
from support.families import DBRX, LONGCAT, STEP
from support.methods import small
from support.models import requests

from kvbench.engine import plan
from kvbench.engine.attention.geometry import ProbeFailed, largest_group
from kvbench.engine.cache.layout import fit
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import auto_class, prepare
from kvbench.engine.model.shape import estimate_shape, known_shape, read_shape, shape_of_model
from kvbench.engine.model.weights import model_fields
from kvbench.engine.plan import Machine, roofline
from kvbench.errors import SetupError, UserError
from kvbench.eviction.choose import make


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "mixtral", "qwen3_vl", "gemma3", "llama"])
def test_a_configuration_tells_what_the_model_tells(model_type):
    config = zoo.configuration(model_type, {})
    assert read_shape(config) == shape_of_model(zoo.build(config))


def test_where_the_configuration_does_not_tell_the_loaded_model_does():
    config = zoo.configuration("jetmoe", {})
    with pytest.raises(ProbeFailed, match="model type 'jetmoe'"):
        read_shape(config)
    loaded = prepare(zoo.build(config), None)
    shape, again = known_shape(config, lambda: loaded)
    assert again is loaded
    assert shape.geometry == loaded.geometry
    estimated = estimate_shape(config)
    assert estimated.parameters == shape.parameters
    assert len(estimated.geometry) == len(shape.geometry)


def test_a_step_reads_the_experts_that_its_tokens_reach():
    shape = read_shape(zoo.configuration("qwen3_moe", {"num_experts": 8, "num_local_experts": 8}))
    layers, hidden, width = zoo.LAYERS, 64, 32
    assert shape.routed == layers * 8 * 3 * hidden * width
    assert shape.active == 0.25
    slow_memory = Machine(bandwidth=1.0, flops=1e30, memory=1 << 40)
    given = shape, slow_memory, shape.geometry
    reading = [slots / roofline(*given, slots, 0, 0, torch.float32) / 4 for slots in (1, 2)]
    per_entry = sum(g.kv_heads * (g.head_dim + g.value_dim) for g in shape.geometry)
    assert reading[0] == pytest.approx(shape.streamed + shape.routed / 4 + per_entry)
    assert reading[1] == pytest.approx(shape.streamed + shape.routed * 7 / 16 + 2 * per_entry)


PROMPT, OUTPUT, INTERVAL, BUDGET, WINDOW = 80, 40, 8, 32, 64


@pytest.mark.parametrize(
    ("method", "held"),
    [
        ("full", PROMPT + OUTPUT / 2),
        ("gkv", BUDGET + INTERVAL / 2),
        ("snapkv", BUDGET + OUTPUT / 2),  # keeps all that is generated
        ("snapkv by query head", BUDGET + 2 * OUTPUT / 2),  # two query heads per KV head, each keeps its own entries
    ],
)
def test_the_limit_counts_the_entries_that_a_cache_holds_on_average(method, held):
    """A window holds the newest tokens whatever the budget, here as many as its size."""
    changes = {"sliding_window": WINDOW, "layer_types": ["full_attention", "sliding_attention"] * 2}
    shape = read_shape(zoo.configuration("qwen3", {"num_hidden_layers": 4, "use_sliding_window": True} | changes))
    full, window = (sum(g.window == size for g in shape.geometry) for size in (None, WINDOW))
    assert (full, window) == (2, 2)
    chosen = small(method)
    made = plan.plan_cell(
        *(shape, Machine(bandwidth=1.0, flops=1e30, memory=1 << 40), chosen),
        budget=BUDGET if chosen.takes_budget else None,
        interval=INTERVAL,
        sequences=1,
        slots=1,
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_tokens=PROMPT + OUTPUT,
        max_output=OUTPUT,
        max_prompt=PROMPT,
    )
    g = shape.geometry[0]
    new = g.group if chosen.per_query_head else 1
    read = 1 / made.limit / 4 - shape.streamed
    assert read / g.kv_heads / 2 / g.head_dim == pytest.approx(full * (held + new) + window * (WINDOW + 1))


GEMMA_4 = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 512}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("aria", {}),
        ("dbrx", DBRX),
        ("gemma4_text", GEMMA_4),
        ("hunyuan_v1_moe", {"moe_topk": [2] * zoo.LAYERS}),
        ("jetmoe", {}),
        ("mixtral", {}),
    ],
)
def test_routed_experts_are_known_by_their_number_wherever_it_is_told(model_type, changes):
    shape = shape_of_model(zoo.build(zoo.configuration(model_type, changes)))
    assert shape.routed > shape.streamed
    assert shape.active == 0.5


def test_no_step_reads_the_rows_of_experts_without_weights():
    none, two = (
        shape_of_model(zoo.build(zoo.configuration("longcat_flash", LONGCAT | {"zero_expert_num": n}))) for n in (0, 2)
    )
    assert (two.routed, two.active) == (none.routed, 2 / 6)
    assert two.streamed - none.streamed == 2 * 64  # of the router
    assert two.parameters - none.parameters == 2 * 64 + 2 * 64 * 64


def test_an_estimate_takes_the_largest_of_sizes_that_differ_between_layers():
    config = zoo.configuration("step3p7", {"text_config": STEP | {"query_pre_attn_scalar": 16}})
    assert {g.query_heads for g in estimate_shape(config).geometry} == {6}


@pytest.mark.parametrize(("window", "refused"), [(4095, True), (4096, False)])
def test_a_window_that_no_layer_applies_must_be_as_long_as_the_context(window, refused):
    config = zoo.configuration("phimoe", {"sliding_window": window})
    with pytest.raises(UserError, match="does not pass its sliding window") if refused else nullcontext():
        read_shape(config)


def test_a_package_that_a_model_needs_is_named_before_its_weights_are_read(monkeypatch):
    """Gemma 3n's vision part needs timm."""
    config = zoo.configuration("llama", {})

    def lacking(*_, **__):
        raise ImportError("\nTower requires timm. You can install it with pip:\n`pip install timm`. Please note that\n")

    monkeypatch.setattr(auto_class(config), "from_config", lacking)
    with pytest.raises(
        SetupError, match=r"^model type 'llama' needs a package .*: Tower .* pip: `pip install timm`\.$"
    ):
        known_shape(config, lambda: pytest.fail("weights were read"))


def test_text_does_not_stream_a_vision_tower_or_an_embedding_table():
    config = zoo.configuration("qwen3_vl", {})
    model = zoo.build(config)
    tower = sum(p.numel() for p in model.model.visual.parameters())
    shape = shape_of_model(model)
    assert shape.parameters - shape.streamed >= tower + 512 * 64
    tied = zoo.configuration("llama", {"tie_word_embeddings": True})
    assert shape_of_model(zoo.build(tied)).streamed == read_shape(tied).parameters


def test_the_copy_that_is_timed_fits_into_memory(monkeypatch):
    ones, asked = torch.ones, []

    def limited(*size, **more):
        asked.append(size)
        if size[0] > 1000:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return ones(*size, **more)

    monkeypatch.setattr(torch, "ones", limited)
    monkeypatch.setitem(plan.PROBES, "cpu", (3000, 8))
    assert plan.measure(torch.device("cpu"), torch.float32).bandwidth > 0
    assert asked == [(8, 8), (3000,), (1500,), (750,)]


@pytest.mark.parametrize("model_type", ["got_ocr2", "llava", "gemma3"])
def test_a_model_keeps_its_own_attention(model_type):
    model = zoo.build(zoo.configuration(model_type, {}))
    parts = [m for m in model.modules() if isinstance(m, transformers.PreTrainedModel)]
    before = [part.config._attn_implementation for part in parts]
    prepare(model, None)
    assert [part.config._attn_implementation for part in parts] == before


def test_positions_that_a_model_counts_its_own_way_are_refused():
    model = zoo.build(zoo.configuration("llama", {}))
    prepare(model, None)
    inner = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: inner(x, position_ids - position_ids[:, :1])
    with pytest.raises(UserError, match=r"model type 'llama'.*a given position"):
        prepare(model, None)


def test_code_that_fails_is_told_with_the_model_type():
    model = zoo.build(zoo.configuration("llama", {}))
    model.model.layers[0].mlp.forward = lambda x: x[:, 7, 9999]
    with pytest.raises(ProbeFailed, match=r"^model type 'llama' is not supported: .*IndexError: "):
        prepare(model, None)


def test_weights_are_known_by_the_fields_of_a_model_whose_layers_differ():
    assert model_fields(zoo.configuration("gemma4_text", {}))["model_type"] == "gemma4_text"


def grouped_alike(heads, window):
    """A model whose layers have `heads` query heads; the second has a sliding window."""
    layers = {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": window}
    sizes = {"num_hidden_layers": 3, "num_attention_heads_per_layer": heads, "mlp_layer_types": ["dense"] * 3}
    return prepare(zoo.build(zoo.configuration("laguna", layers | sizes)), None)


def snapkv_by_query_head(loaded):
    method = make("snapkv", {"window": 4, "heads": "query"})
    engine = Engine(loaded, method, budget=32, interval=8, slots=1, max_tokens=130)
    [done] = engine.generate(requests(lengths=(60,), new_tokens=(20,), samples=1))
    return done.usage.entries_after_evict, sum(engine.cache.lengths)


def test_layers_that_no_method_evicts_do_not_divide_budgets():
    """Four sliding query heads per KV head took half of the budget from layers with two."""
    assert largest_group(grouped_alike([4, 8, 4], 24).geometry) == 2
    assert snapkv_by_query_head(grouped_alike([4, 8, 4], 24)) == snapkv_by_query_head(grouped_alike([4, 4, 4], 24))


@pytest.mark.parametrize("method", ["snapkv", "foresightkv"])
def test_numbers_per_query_head_need_equal_layers(method):
    loaded = grouped_alike([4, 8, 4], 500)  # no sequence outgrows the window, so all layers are evicted
    options = {"heads": "query"} if method == "snapkv" else {"scorer": "s"}
    with pytest.raises(UserError, match=r"have 2 or 4 query heads per KV head, and \w+ needs equally many"):
        fit(loaded.geometry, make(method, options), 130)
