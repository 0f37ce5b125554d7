"""What must hold for every method: batches, storage order, padding, group size, budgets."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvbench.eviction.select import decide
from kvbench.eviction.view import make_view
from kvbench.registry import methods

METHODS = {
    "random": {},
    "streaming-llm": {},
    "knorm": {},
    "tova": {},
    "h2o": {},
    "snapkv-decode": {},
    "snapkv-decode gkv": {"variant": "gkv"},
    "snapkv-decode reference": {"compat": "reference"},
    "snapkv-decode global": {"global_score": "max"},
    "snapkv-decode gkv global": {"variant": "gkv", "global_score": "mean"},
    "rkv": {},
    "rkv reference": {"compat": "reference"},
    "rkv first": {"spare": "first"},
    "rkv global": {"global_score": "sum", "lam": 0.5},
    "snapkv": {"window": 8},
    "snapkv avg": {"window": 8, "kernel": 5, "pool": "avg", "reduce_g": "max"},
    "gkv": {},
    "gkv mean pooled": {"form": "mean", "kernel": 5, "redundancy": False},
    "gkv sum": {"form": "sum", "window": 1, "alpha": 1.0},
    "gkv local shift": {"form": "local", "norm": False, "gamma": 200.0},
    "gkv reference": {"compat": "reference"},
}
BUDGET, INTERVAL, PROMPT = 24, 16, 42


@pytest.fixture(params=METHODS)
def method(request):
    return methods.get(request.param.split()[0])(**METHODS[request.param])


def evict(method, run, queries, keys, **more):
    return run(method, queries, keys, budget=BUDGET, interval=INTERVAL, prompt=PROMPT, **more)


def test_budget_and_protection_hold(method, evictions, stream):
    kept = evict(method, evictions, *stream())
    assert len(kept) == 4
    protect = method.protect(BUDGET)
    for step, positions in enumerate(kept):
        seen = PROMPT + step * INTERVAL
        assert positions.shape[-1] == BUDGET
        assert bool((positions.diff(dim=-1) > 0).all())
        assert bool((positions[..., BUDGET - protect.recent :] >= seen - protect.recent).all())
        assert bool((positions[..., : protect.sinks] < protect.sinks).all())


def test_a_sequence_alone_keeps_what_it_keeps_among_others(method, evictions, stream):
    queries, keys = stream()
    together = evict(method, evictions, queries, keys)
    for i in [0] if type(method).__name__ == "Random" else range(3):  # noise belongs to the sample, here number 0
        alone = evict(method, evictions, queries[i : i + 1], keys[i : i + 1])
        assert all(torch.equal(a[0], t[i]) for a, t in zip(alone, together))


def test_scores_are_the_same_bits_in_every_batch(method, stream):
    view = full_view(method, *stream(b=5))
    together = method.score(view)
    for i in range(5):
        alone = method.score(pick(view, [i]))
        assert torch.equal(as_score(alone)[0], as_score(together)[i])


def test_permuting_the_batch_permutes_the_result(method, stream):
    view = full_view(method, *stream(b=4))
    order = [2, 0, 3, 1]
    assert torch.equal(kept(method, pick(view, order)), kept(method, view)[order])


def test_storage_order_does_not_matter(method, evictions, stream):
    queries, keys = stream(seed=5)
    plain = evict(method, evictions, queries, keys)
    for seed in (1, 2):
        shuffled = evict(method, evictions, queries, keys, shuffle=seed)
        assert all(torch.equal(a, b) for a, b in zip(plain, shuffled))


def test_padding_does_not_matter(method, stream):
    if any(column.name == "rank" for column in method.columns()):
        pytest.skip("topk breaks ties by the length of a row")
    queries, keys = stream()
    view = full_view(method, queries, keys)
    padded = full_view(method, queries, keys)
    junk = 7
    for name in ("keys", "values", "positions", "valid"):
        x = getattr(padded, name)
        pad = torch.full_like(x[:, :, :junk], {"positions": -1, "valid": False}.get(name, float("nan")))
        setattr(padded, name, torch.cat([x[:, :, :4], pad, x[:, :, 4:]], dim=2))
    padded.columns = {
        c: torch.cat([x[..., :4], torch.full_like(x[..., :junk], 1e9), x[..., 4:]], -1) for c, x in view.columns.items()
    }
    keep = kept(method, padded)
    assert not keep[..., 4 : 4 + junk].any()
    assert torch.equal(torch.cat([keep[..., :4], keep[..., 4 + junk :]], dim=-1), kept(method, view))


@pytest.mark.parametrize("g", [1, 4])
def test_every_group_size(method, evictions, stream, g):
    kept = evict(method, evictions, *stream(g=g, hk=2))
    assert all(positions.shape == (3, 2, BUDGET) for positions in kept)


def test_one_query_head_for_each_copy_of_its_keys(method, evictions, stream):
    """A group whose queries are equal decides like that query alone: every reduction but the sum is idempotent."""
    queries, keys = stream(g=1)
    alone = evict(method, evictions, queries, keys)
    grouped = evict(method, evictions, queries.repeat_interleave(2, dim=1), keys)
    assert all(torch.equal(a, b) for a, b in zip(alone, grouped))


def full_view(method, queries, keys, total=60):
    """A cache that was never evicted, shuffled, with columns as after some evictions."""
    generator = torch.Generator().manual_seed(1)
    b, hk = keys.shape[:2]
    positions = torch.rand(b, hk, total, generator=generator).argsort(dim=-1)
    cached = keys.gather(2, positions[..., None].expand(-1, -1, -1, keys.shape[-1]))
    needs = method.needs()
    width = {"none": 0, "last": 1, "window": needs.window, "since_last": 9}[needs.queries]
    columns = {}
    for column in method.columns():
        if column.name == "rank":  # whole numbers, one each
            values = torch.rand(b, hk, total, generator=generator).argsort(dim=-1).float()
        else:
            values = torch.rand(b, hk, total, generator=generator)
        columns[column.name] = torch.where(positions < 30, values, column.init)
    return make_view(cached, queries[:, :, total - width : total], positions=positions, columns=columns, budget=BUDGET)


def pick(view, rows):
    """The view of some of the sequences."""
    changes = {
        f.name: getattr(view, f.name)[rows]
        for f in dataclasses.fields(view)
        if isinstance(getattr(view, f.name), torch.Tensor)
    }
    return dataclasses.replace(view, **changes, columns={name: c[rows] for name, c in view.columns.items()})


def as_score(out):
    return out if isinstance(out, torch.Tensor) else out.score


def kept(method, view):
    return decide(method, [view])[0].keep
