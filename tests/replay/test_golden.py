"""The oracle: its tables against the definition, what it keeps by hand, and that nothing but a replay runs it."""

from __future__ import annotations

import pytest
import torch
from support.models import build
from support.traces import traces

from kvbench.engine.attention.interface import route
from kvbench.engine.loop import Engine
from kvbench.errors import UserError
from kvbench.eviction.choose import make
from kvbench.eviction.select import decide
from kvbench.eviction.terms.golden import block_attention, golden_evictions, upcoming
from kvbench.eviction.view import make_view
from kvbench.integrations.transformers_cache import EvictionCache
from kvbench.replay.batches import replay
from kvbench.replay.choices import FLOOR, ORACLE, Chosen
from kvbench.replay.reader import TraceReader
from kvbench.replay.reference import FutureAttention, read_full, read_future

INTERVAL = 8


def reference(loaded, asked, *, chunk=20, extreme=False):
    reader = TraceReader(loaded, make("full", {}), budget=None, interval=INTERVAL, max_tokens=200, chunk=chunk)
    return read_full(reader, asked, extreme=extreme)


def queries_and_keys(loaded, ids):
    """Post-RoPE queries and keys of every layer of a sequence, from one plain forward pass."""
    seen = {}

    def attend(call):
        seen[call.layer] = call.query[0], call.key[0]
        out = torch.nn.functional.scaled_dot_product_attention(
            call.query, call.key, call.value, is_causal=True, scale=call.scaling, enable_gqa=True
        )
        return out.transpose(1, 2)

    with torch.inference_mode(), route(loaded.model, attend):
        loaded.model(input_ids=torch.tensor([ids]), position_ids=torch.arange(len(ids))[None], attention_mask=None)
    return seen


@pytest.mark.parametrize("chunk", [5, 512])
def test_attention_of_blocks_is_that_of_the_definition(chunk):
    loaded, asked = build("qwen3"), traces([(21, 30), (21, 30)])
    found = reference(loaded, asked, chunk=chunk)
    for i, trace in enumerate(asked):
        for layer, (queries, keys) in queries_and_keys(loaded, [*trace.prompt, *trace.answer[:-1]]).items():
            scaling = loaded.geometry[layer].scaling
            wanted = block_attention(queries, keys, INTERVAL, first=21, scaling=scaling)
            assert found.attention[layer][i].shape == wanted.shape == (2, 4, 50)
            assert (found.attention[layer][i] - wanted).abs().max() < 1e-5


def test_the_tables_alone_are_read_without_logits_and_outputs():
    loaded, asked = build("qwen3"), traces([(21, 30), (21, 30)])
    reader = TraceReader(loaded, make("full", {}), budget=None, interval=INTERVAL, max_tokens=200)
    wanted = read_full(reader, asked, extreme=True).future()
    found = read_future(reader, asked, extreme=True)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], table) for name, table in wanted.items())
    record = FutureAttention(asked, INTERVAL, loaded.device)
    reader.read(asked, record)
    assert {name for name, value in vars(record).items() if isinstance(value, (list, dict)) and value} == {
        "traces",
        "attention",
    }


def test_the_most_that_one_query_pays():
    loaded, asked = build("qwen3"), traces([(21, 30)])
    found = reference(loaded, asked, extreme=True)
    for layer, (queries, keys) in queries_and_keys(loaded, [*asked[0].prompt, *asked[0].answer[:-1]]).items():
        logits = (queries.view(2, 2, 50, -1) @ keys[:, None].transpose(-1, -2)) * loaded.geometry[layer].scaling
        future = torch.ones(50, 50, dtype=torch.bool).triu(1)
        weights = logits.masked_fill(future, float("-inf")).softmax(dim=-1).mean(dim=1)  # [Hk, T, T]
        wanted = torch.stack([weights[:, start : start + INTERVAL].amax(dim=1) for start in (21, 29, 37, 45)], dim=1)
        assert (found.most[layer][0] - wanted).abs().max() < 1e-5


def future_of(table, interval, within="mean"):
    """`view.weights` of one layer from attention [Hk, blocks, T]."""
    coming = torch.nn.functional.pad(upcoming(table), (0, 0, 0, 1))
    return {"interval": torch.tensor(interval), f"{within}.0": coming[None]}


@pytest.mark.parametrize("within", ["mean", "max"])
def test_keeps_what_comes_to_be_read(within):
    table = torch.zeros(1, 2, 12)
    table[0, 0, [1, 5]] = 0.5  # by the first block only
    table[0, 1, [3, 5]] = 0.9  # by the second
    weights = future_of(table, 4, within)

    def kept(seen, budget):
        view = make_view(torch.zeros(1, 1, seen, 4), budget=budget, seen=seen, prompt_len=8, weights=weights)
        return decide(make("golden", {"within": within}), [view])[0].keep[0, 0].nonzero().flatten().tolist()

    assert kept(8, 3) == [1, 3, 5]
    assert kept(12, 2) == [3, 5]  # the first block is over
    assert kept(12, 3) == [3, 5, 11]  # of entries that nobody reads the newest


def test_drops_what_the_label_maker_drops():
    """With the newest L protected it is the schedule that ForesightKV's supervised stage learns."""
    budget, interval, total = 12, 4, 40
    table = torch.rand(2, 6, total, generator=torch.Generator().manual_seed(0))
    wanted = golden_evictions(table, budget, interval)
    alive = torch.arange(total).expand(2, -1)
    for step in range(len(wanted.dropped)):
        # The label maker's cache holds the oldest C and the newest L, and goes on with C.
        seen = budget + interval * (step + 1)
        positions = alive[:, : budget + interval]
        view = make_view(
            torch.zeros(1, 2, budget + interval, 4),
            budget=budget,
            positions=positions[None],
            seen=seen,
            prompt_len=budget + interval,
            weights=future_of(table, interval),
        )
        keep = decide(make("golden", {"within": "mean", "recent": interval}), [view])[0].keep[0]
        assert torch.equal(positions[~keep].view(2, -1), wanted.dropped[step])
        stays = torch.ones_like(alive, dtype=torch.bool)
        stays[:, : budget + interval] = keep
        alive = alive[stays].view(2, -1)


def test_one_query_s_need_counts_by_default():
    """On the mean over a long block a token that one query cannot do without looks worse than one all glance at."""
    paid = torch.zeros(1, 1, 16)
    paid[0, 0, 2] = 0.95 / 8  # by one of 8 queries
    paid[0, 0, 4] = 0.2  # by all of them
    most = paid.clone()
    most[0, 0, 2] = 0.95
    weights = future_of(paid, 8) | future_of(most, 8, "max")
    view = make_view(torch.zeros(1, 1, 8, 4), budget=1, seen=8, prompt_len=8, weights=weights)
    kept = [decide(make("golden", o), [view])[0].keep[0, 0].nonzero().item() for o in ({"within": "mean"}, {})]
    assert kept == [4, 2]


def test_nothing_but_a_replay_runs_it():
    loaded, [trace] = build("qwen3"), traces([(45, 4)])
    engine = Engine(loaded, make("golden", {}), budget=24, interval=8, slots=1, max_tokens=60)
    with pytest.raises(UserError, match="'golden' is an oracle"):
        list(engine.generate([trace.request]))
    ids = torch.tensor([trace.prompt])
    with EvictionCache(loaded.model, "golden", budget=24) as cache, pytest.raises(UserError, match="is an oracle"):
        loaded.model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=3)


def test_loses_the_least_attention_of_methods_with_equal_heads():
    loaded, asked = build("qwen3"), traces([(45, 40)] * 4)
    names = ("knorm", "h2o", "gkv", "tova", "rkv")
    chosen = [Chosen(method=m, budget=24) for m in (ORACLE, FLOOR, *(type(FLOOR)(name=n) for n in names))]
    rows = replay(loaded, "t", asked, chosen, interval=8, max_tokens=100).rows
    lost = {row["method"]: row["mass_lost"] for row in rows}
    assert min(lost, key=lost.__getitem__) == "golden"
    assert lost["golden"] < 0.95 * sorted(lost.values())[1]


@pytest.mark.parametrize("within", ["mean", "max"])
def test_follows_a_method_that_evicts_the_prompt_with_probes(within):
    """Such a method reads traces one by one; each gets its own part of the recorded attention."""
    loaded, asked = build("qwen3"), traces([(45, 20)] * 2)
    pairs = (("kvzip+golden", (("golden.within", within),)), ("kvzip+random", ()))
    chosen = [Chosen(method=type(FLOOR)(name=name, options=options), budget=24) for name, options in pairs]
    rows = replay(loaded, "t", asked, chosen, interval=8, max_tokens=100).rows
    best, worst = sorted(rows, key=lambda row: row["mass_lost"])
    assert best["method"].startswith("kvzip+golden")
    assert best["mass_lost"] < worst["mass_lost"]
