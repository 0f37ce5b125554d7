"""The paged layout: the same tokens as the dense one, memory that follows the entries, pages that come back."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from support.methods import EVICTING, small, with_tables
from support.models import ARCHITECTURES, build, requests

from kvbench.engine.cache.paged import PagedCache
from kvbench.engine.cache.pool import PAGE, pages
from kvbench.engine.cache.prompt_layer import PackedLayer
from kvbench.engine.cache.slot_cache import Shape
from kvbench.engine.cache.stack import RowBatch
from kvbench.engine.loop import Engine
from kvbench.eviction.api import Column

TODO = dict(lengths=(9, 60, 33, 5, 100, 48), new_tokens=(40, 50, 30, 40, 30, 30), samples=2)


@pytest.fixture(scope="module")
def loaded():
    return with_tables(build("qwen3"))


def engine(loaded, method, **more):
    instance = small(method)
    budget = 24 if instance.takes_budget else None
    return Engine(loaded, instance, budget=budget, interval=8, slots=4, max_tokens=200, **more)


def tokens(made, todo):
    return {(d.request.doc_id, d.sample): d.token_ids for d in made.generate(todo)}


@pytest.mark.parametrize("method", ["full", *(name for name in EVICTING if small(name).uniform)])
def test_both_layouts_give_the_same_tokens(loaded, method):
    todo = requests(**TODO)
    assert tokens(engine(loaded, method, layout="paged"), todo) == tokens(engine(loaded, method, layout="dense"), todo)


@pytest.mark.parametrize("method", ["pyramidkv", "ada-kv", "headkv", "cake", "duo", "kvzip", "two methods, uneven"])
def test_bytes_follow_entries_within_a_page_a_head(loaded, method):
    made = engine(loaded, method, look=1)
    cache = made.cache
    assert isinstance(cache, PagedCache)
    entry = next(iter(cache.pools.values())).page_bytes // PAGE
    heads = sum(stack.blocks.lengths.shape[1] * len(stack.members) for stack in cache.stacks)
    checked = []

    def step(count, live, slots):
        for slot in range(cache.slots):
            if cache.seen[slot]:
                held = cache.held(slot) * heads * entry
                used = cache.live_bytes(slot) - cache.fixed_bytes(cache.seen[slot])
                assert held <= used < held + heads * PAGE * entry
                checked.append(slot)

    made.on_step = step
    list(made.generate(requests(**TODO)))
    assert len(checked) > 100
    for pool in cache.pools.values():  # every page came back, once
        assert sorted(pool.free) == list(range(1, len(pool.keys) // PAGE))


def test_heads_end_with_different_lengths(loaded):
    made = engine(loaded, "ada-kv while decoding")
    spread = []

    def step(*_):
        spread.append(max(int(np.ptp(stack.blocks.lengths, axis=1).max()) for stack in made.cache.stacks))

    made.on_step = step
    list(made.generate(requests(**TODO)))
    assert max(spread) > 4


def test_a_short_cache_read_whole_and_a_long_one_in_doubling_sizes_agree(loaded, monkeypatch):
    from kvbench.engine import step_writers

    todo = requests(**TODO)
    whole = tokens(engine(loaded, "ada-kv"), todo)
    monkeypatch.setattr(step_writers, "FIXED_ROWS", 16)
    doubled = tokens(engine(loaded, "ada-kv"), todo)
    shuffled = tokens(engine(loaded, "ada-kv"), todo[::-1])
    assert whole == doubled == shuffled


def test_compaction_against_a_list_of_lists(loaded):
    """Random installs, steps and evictions, with plain lists as the slow reference."""
    geometry = loaded.geometry[:2]
    shape = Shape(slots=3, rows=40, bounded=True, longest=400, columns=(Column(name="c", init=-1.0),))
    cache = PagedCache(geometry, shape, torch.device("cpu"), torch.float32)
    total = 1 + pages(geometry, shape)
    rng = random.Random(0)
    truth: dict[int, list[list[int]]] = {}

    def values(positions, dim):
        return torch.tensor([[float(p)] * dim for p in positions]).view(-1, dim)

    for _ in range(120):
        slot = rng.randrange(3)
        [stack] = cache.stacks
        if slot not in truth:
            seen = rng.randrange(20, 60)
            packed = {}
            for g in geometry:
                kept = [sorted(rng.sample(range(seen), rng.randrange(1, 20))) for _ in range(g.kv_heads)]
                truth.setdefault(slot, []).extend(kept)
                flat = [p for head in kept for p in head]
                packed[g.index] = PackedLayer(
                    lengths=[len(head) for head in kept],
                    keys=values(flat, g.head_dim),
                    values=values(flat, g.value_dim),
                    positions=torch.tensor(flat, dtype=torch.int32),
                    columns={"c": torch.tensor(flat, dtype=torch.float32)},
                    states={},
                    queries=torch.zeros(g.query_heads, 0, g.head_dim),
                    hidden=torch.zeros(1, 0, g.hidden),
                )
            cache.install(packed, [slot], seen)
        elif rng.random() < 0.2:
            cache.clear(slot)
            del truth[slot]
        else:
            steps = rng.randrange(1, 12)
            for _ in range(steps):
                cache.make_room([int(s == slot) for s in range(3)])
                for stack in cache.stacks:
                    places = torch.from_numpy(stack.blocks.lengths.copy())[..., None]
                    at = stack.blocks.at(slice(None), places)[stack.rows_of([slot])].view(-1)
                    stack.pool.keys[at] = float(cache.seen[slot])
                    stack.pool.values[at] = float(cache.seen[slot])
                for head in truth[slot]:
                    head.append(cache.seen[slot])
                cache.advance([slot])
            for number, row in enumerate(stack.rows_of([slot])):
                made = batch(row, cache.seen[slot])
                stack.complete(made, steps)
                rows = stack.entries(made)
                heads = truth[slot][number * 2 : number * 2 + 2]
                valid = rows.valid if rows.valid is not None else torch.ones_like(rows.positions, dtype=torch.bool)
                shown = [sorted(p[v].tolist()) for p, v in zip(rows.positions[0], valid[0])]
                assert shown == [sorted(head) for head in heads]
                assert torch.equal(rows.keys[0, ..., 0][valid[0]], rows.positions[0][valid[0]].float())
                old = rows.columns["c"][0][valid[0]]
                assert torch.equal(old[old >= 0], rows.positions[0][valid[0]][old >= 0].float())
                keep = valid & (torch.rand(valid.shape) < 0.7)
                keep[..., 0] = True
                for h, head in enumerate(heads):
                    head[:] = rows.positions[0, h][keep[0, h]].tolist()
                stack.compact(made, keep)
            cache.settle({slot: 40})
        for other, heads in truth.items():  # the running sums against slow ones
            assert cache.held(other) == sum(map(len, heads)) / len(heads)
            held = sum(-(-len(head) // PAGE) for head in heads) * stack.pool.page_bytes
            assert held <= cache.live_bytes(other) <= held + len(heads) * stack.pool.page_bytes
        blocks = stack.blocks
        by_slot = [blocks.pages[stack.rows_of([s])].sum() for s in range(3)]
        assert blocks.used.tolist() == by_slot
        assert blocks.entries.tolist() == [blocks.lengths[stack.rows_of([s])].sum() for s in range(3)]
        assert [cache.live_bytes(s) - cache.fixed_bytes(0) for s in range(3)] == [
            count * stack.pool.page_bytes for count in by_slot
        ]
        used = int(blocks.pages.sum())
        assert used + len(next(iter(cache.pools.values())).free) + 1 == total


def batch(row, seen):
    one = torch.tensor([0])
    return RowBatch(
        rows=np.array([row]),
        index=torch.tensor([row]),
        at=slice(row, row + 1),
        seen=torch.tensor([seen]),
        longest=seen,
        prompt_len=one,
        evictions=one,
        noise_key=one,
        allowed=40,
    )


@pytest.mark.parametrize("heads", [3, 5])
def test_a_shared_budget_holds_with_any_number_of_heads(heads, monkeypatch):
    """The mean over heads and layers must not be rounded above the budget, where it is exact."""
    many = dict(num_attention_heads=2 * heads, num_key_value_heads=heads, head_dim=16)
    monkeypatch.setitem(ARCHITECTURES, "many-heads", ("Qwen3Config", many))
    loaded = with_tables(build("many-heads"))
    for budget in (37, 40, 41):
        engine = Engine(loaded, small("retention"), budget=budget, interval=8, slots=2, max_tokens=130)
        for done in engine.generate(requests(lengths=(61, 70), new_tokens=(20, 20), samples=1)):
            assert done.usage.entries_after_evict == pytest.approx(budget, abs=0.5)
            assert done.usage.entries_after_evict <= budget
