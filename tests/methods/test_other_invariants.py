"""Methods with state, columns or weights: batches, padding and storage order must not matter."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvbench.eviction.columns import GivenColumn
from kvbench.eviction.rope import Rope
from kvbench.eviction.select import decide
from kvbench.eviction.view import make_view
from kvbench.registry import methods

METHODS = {
    "cake": {"window": 8},
    "cake official": {"window": 8, "rounding": "official"},
    "cake decode": {"window": 8, "decode": True},
    "morphkv": {"window": 8},
    "morphkv mistral": {"window": 8, "form": "mistral", "fuse": "max", "voters": 7},
    "rpc": {"R": 6, "kernel": 5},
    "rpc long prompt": {"R": 6, "pool": "max", "kernel": 3},
    "rpc group": {"R": 6, "aggregate": "group", "selectors": "new"},
    "rpc native": {"form": "native", "P": 10, "R": 6, "c": 5.0, "compat": "reference"},
    "duo": {"sinks": 2, "recent": 8},
    "duo sparsity": {"sinks": 2, "recent": 8, "sparsity": 0.5},
    "keydiff": {},
    "expected-attention": {},
    "lagkv": {"sinks": 2, "lag": 5},
    "lagkv cross": {"sinks": 2, "lag": 5, "cross": True},
    "lagkv rate": {"sinks": 2, "lag": 5, "form": "rate"},
    "criticalkv": {"base": "snapkv(window=8)"},
    "criticalkv ada": {"base": "snapkv(window=8)", "ada": True},
    "defensivekv": {"window": 8},
    "defensivekv model": {"window": 8, "level": "model", "norm": "tokens", "bias": "window"},
    "caote": {"window": 8, "kernel": 5},
    "caote squared": {"form": "squared"},
    "vase": {"window": 8},
    "vase top": {"window": 8, "draw": False, "sinks": 0},
}
TOTAL, LAYERS, HEADS, D = 60, 2, 2, 8
FIELDS = ("keys", "values", "positions", "valid")


@pytest.fixture(params=METHODS)
def case(request):
    name = request.param
    method = methods.get(name.split()[0])(**METHODS[name])
    prompt = 56 if name == "rpc long prompt" else 36
    return method, [layer(method, prompt, seed) for seed in range(LAYERS)]


def layer(method, prompt, seed, b=4):
    """A layer whose entries lie in any order, after some evictions: a quarter of the older tokens is gone."""
    g = torch.Generator().manual_seed(seed)
    rope = Rope(torch.tensor([1.0, 0.3, 0.1, 0.01]))
    keys, values = torch.randn(2, b, HEADS, TOTAL, D, generator=g)
    queries = 2 * torch.randn(b, 2 * HEADS, TOTAL, D, generator=g)
    positions = torch.rand(b, HEADS, TOTAL, generator=g).argsort(dim=-1)
    there = {"valid": positions % 4 > 0} if type(method).__name__ in ("MorphKV", "KeyDiff", "ExpectedAttention") else {}
    budget = method.allowed(24 if method.takes_budget else None, prompt, TOTAL, 0)
    more = {"budget": budget, "seen": TOTAL, "prompt_len": prompt, "layer": seed, "ordinal": seed}
    more |= {"layer_count": LAYERS, "rope": rope, "positions": positions, "values": values, **there}
    if type(method).__name__ == "Duo":
        more["weights"] = {"alpha": torch.tensor([[0.2, 0.9], [0.5, 0.4]])}
    given = [c.name for c in method.columns() if isinstance(c, GivenColumn)]
    more["columns"] = {name: torch.rand(b, HEADS, TOTAL, generator=g) for name in given}
    sizes = {"query_heads": 2 * HEADS, "kv_heads": HEADS, "head_dim": D}
    states = {s.name: torch.zeros(b, *[sizes.get(x, x) for x in s.shape]) for s in method.states()}
    if method.needs().queries == "since_last":
        states = method.observe(make_view(keys, queries, **more, states=states))
    elif states:
        states = {"entries": states["entries"] + 24, "evicted_at": states["evicted_at"] + 50}
    return make_view(keys, queries[:, :, TOTAL - method.needs().width :], **more, states=states)


def kept(method, views):
    """Sorted positions that stay, for every sequence, layer and head."""
    verdicts = decide(method, views)
    return [
        [[sorted(p[k].tolist()) for p, k in zip(view.positions[i], v.keep[i])] for view, v in zip(views, verdicts)]
        for i in range(len(views[0].seen))
    ]


def pick(view, rows):
    """The view of some of the sequences."""
    names = [f.name for f in dataclasses.fields(view) if isinstance(getattr(view, f.name), torch.Tensor)]
    changes = {name: getattr(view, name)[rows] for name in names}
    kept = {kind: {name: x[rows] for name, x in getattr(view, kind).items()} for kind in ("states", "columns")}
    return dataclasses.replace(view, **changes, **kept)


def test_something_goes_and_every_head_keeps_something(case):
    method, views = case
    sizes = [len(head) for sequence in kept(method, views) for layer in sequence for head in layer]
    held = [int(n) for view in views for n in view.held().flatten()]
    assert min(sizes) > 0
    assert sum(sizes) < sum(held)


def test_a_sequence_alone_keeps_what_it_keeps_among_others(case):
    method, views = case
    together = kept(method, views)
    for i in range(4):
        assert kept(method, [pick(view, [i]) for view in views]) == [together[i]]


def test_scores_are_the_same_bits_in_every_batch(case):
    method, views = case
    for view in views:
        together = score(method, view)
        for i in range(4):
            assert torch.equal(score(method, pick(view, [i]))[0], together[i])


def test_permuting_the_batch_permutes_the_result(case):
    method, views = case
    order = [2, 0, 3, 1]
    together = kept(method, views)
    assert kept(method, [pick(view, order) for view in views]) == [together[i] for i in order]


def test_storage_order_does_not_matter(case):
    method, views = case
    generator = torch.Generator().manual_seed(9)
    moved = []
    for view in views:
        order = torch.rand(view.positions.shape, generator=generator).argsort(dim=-1)
        rows = order[..., None].expand(-1, -1, -1, D)
        changes = {n: getattr(view, n).gather(2, rows if n in ("keys", "values") else order) for n in FIELDS}
        columns = {name: x.gather(2, order) for name, x in view.columns.items()}
        moved.append(dataclasses.replace(view, **changes, columns=columns))
    assert kept(method, moved) == kept(method, views)


def test_padding_does_not_matter(case):
    method, views = case
    padded = []
    for view in views:
        changes = {}
        for name in FIELDS:
            x = getattr(view, name)
            pad = torch.full_like(x[:, :, :7], {"positions": -1, "valid": False}.get(name, float("nan")))
            changes[name] = torch.cat([x[:, :, :5], pad, x[:, :, 5:]], dim=2)
        nan = torch.full_like(view.positions[:, :, :7], float("nan"), dtype=torch.float32)
        columns = {name: torch.cat([x[:, :, :5], nan, x[:, :, 5:]], dim=2) for name, x in view.columns.items()}
        padded.append(dataclasses.replace(view, **changes, columns=columns))
    assert kept(method, padded) == kept(method, views)


def score(method, view):
    out = method.score(view)
    return out if isinstance(out, torch.Tensor) else out.score
