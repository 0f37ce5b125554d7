"""Redundancy against plain loops over keys."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.eviction.terms import redundancy as module
from kvbench.eviction.terms.redundancy import redundancy
from kvbench.eviction.view import make_view


def naive(keys, positions, valid, threshold, spare="last", column_zero=False):
    """One head at a time, in float64."""
    out = torch.zeros(positions.shape, dtype=torch.float64)
    for i, h in ((i, h) for i in range(keys.shape[0]) for h in range(keys.shape[1])):
        line = sorted((j for j in range(keys.shape[2]) if valid[i, h, j]), key=lambda j: int(positions[i, h, j]))
        k = keys[i, h, line].double()
        k = k / (k.norm(dim=-1, keepdim=True) + 1e-8)
        s = (k @ k.T).fill_diagonal_(0.0)
        for row in s:
            similar = (row > threshold).nonzero().flatten().tolist()
            if column_zero and (not similar or spare == "first"):
                row[0] = 0.0
            elif similar:
                row[similar[-1] if spare == "last" else similar[0]] = 0.0
        out[i, h, line] = s.mean(dim=0).softmax(dim=0)
    return out


def inputs(n, seed, d=4, b=2, heads=2):
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(b, heads, max(1, n // 3), d, generator=generator)
    pick = torch.randint(base.shape[2], (b, heads, n), generator=generator)
    keys = base.gather(2, pick[..., None].expand(-1, -1, -1, d))
    keys = keys + 0.3 * torch.randn(b, heads, n, d, generator=generator)  # near copies
    positions = torch.stack([torch.randperm(n, generator=generator) for _ in range(b * heads)]).view(b, heads, n)
    return make_view(keys, positions=positions, budget=1)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 12), seed=st.integers(0, 99), threshold=st.sampled_from([0.0, 0.5, 0.9]),
    spare=st.sampled_from(["last", "first"]), column_zero=st.booleans(), padded=st.booleans(),
)  # fmt: skip
def test_matches_loops(n, seed, threshold, spare, column_zero, padded):
    view = inputs(n, seed)
    if padded:
        view.valid = torch.arange(n).expand_as(view.positions) < max(1, n - 2)
        view.keys = torch.where(view.valid[..., None], view.keys, torch.nan)
    got = redundancy(view, threshold, view.text_order(), spare=spare, column_zero=column_zero)
    want = naive(view.keys, view.positions, view.valid, threshold, spare, column_zero)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("scratch", [5, 30, 130, 300])
def test_blocks_do_not_change_the_result(scratch, monkeypatch):
    view = inputs(11, seed=3)
    whole = redundancy(view, 0.5, view.text_order())
    monkeypatch.setattr(module, "CPU_SCRATCH_FLOATS", scratch)
    torch.testing.assert_close(redundancy(view, 0.5, view.text_order()), whole)


def test_a_sequence_alone_gives_the_same_bits():
    view = inputs(40, seed=1, d=16, b=7)
    together = redundancy(view, 0.5, view.text_order())
    for i in range(7):
        alone = make_view(view.keys[i : i + 1], positions=view.positions[i : i + 1], budget=1)
        assert torch.equal(redundancy(alone, 0.5, alone.text_order())[0], together[i])


@pytest.mark.parametrize(("copies", "want"), [((1, 6), [0, 0]), ((1, 3, 6), [2, 1, 0]), ((0, 1, 5, 7), [3, 3, 2, 0])])
def test_the_newest_copy_is_spared(copies, want):
    """Each copy's row spares the newest other one, so a pair spares each other and of more the oldest lose most."""
    keys = torch.eye(9)[None, None, :8].clone()
    keys[0, 0, list(copies)] = torch.eye(9)[8]
    view = make_view(keys, budget=1)
    r = redundancy(view, 0.5, view.text_order())[0, 0]
    other = next(i for i in range(8) if i not in copies)
    extra = 8 * (r[list(copies)] / r[other]).log()  # a copy's column sum; the others' is 0
    torch.testing.assert_close(extra, torch.tensor(want).float(), rtol=1e-4, atol=1e-4)
