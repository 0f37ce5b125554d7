"""Helpers of the view: text order, recent entries, pooling along the text."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.eviction.view import make_view


def shuffled(n, seed=0, b=2, heads=2):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(2 * n, generator=generator)[:n] for _ in range(b * heads)]
    return make_view(torch.zeros(b, heads, n, 1), positions=torch.stack(rows).view(b, heads, n), seen=2 * n, budget=1)


def naive_pool(scores, positions, among, kind, kernel):
    """Walk each head's marked entries in text order."""
    out = torch.full_like(scores, -math.inf)
    for i, h in ((i, h) for i in range(scores.shape[0]) for h in range(scores.shape[1])):
        line = sorted((j for j in range(scores.shape[2]) if among[i, h, j]), key=lambda j: int(positions[i, h, j]))
        for place, j in enumerate(line):
            near = [float(scores[i, h, k]) for k in line[max(0, place - kernel // 2) : place + kernel // 2 + 1]]
            out[i, h, j] = max(near) if kind == "max" else sum(near) / kernel
    return out


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 12),
    kernel=st.sampled_from([1, 3, 5, 7]),
    kind=st.sampled_from(["max", "avg"]),
    window=st.integers(0, 6),
    seed=st.integers(0, 99),
)
def test_pool_smooths_along_the_text(n, kernel, kind, window, seed):
    view = shuffled(n, seed)
    scores = torch.rand(2, 2, n, generator=torch.Generator().manual_seed(seed))
    among = view.older(window)
    got = view.pool(scores, kind, kernel, among)
    torch.testing.assert_close(got, naive_pool(scores, view.positions, among, kind, kernel))
    assert torch.equal(view.pool(scores, kind, kernel, among, view.text_order()), got)


def test_pool_never_mixes_in_invalid_entries():
    view = shuffled(8)
    view.valid = torch.arange(8).expand(2, 2, 8) < 6
    scores = torch.rand(2, 2, 8)
    want = view.pool(scores, "max", 5, view.older(2))
    dirty = torch.where(view.valid, scores, torch.nan)
    assert torch.equal(view.pool(dirty, "max", 5, view.older(2)), want)


def test_recent_and_older_split_the_valid_entries():
    view = make_view(torch.zeros(1, 1, 4, 1), positions=torch.tensor([[[3, 0, 9, 8]]]), seen=10, budget=1)
    assert view.recent(2)[0, 0].tolist() == [False, False, True, True]
    assert view.older(2)[0, 0].tolist() == [True, True, False, False]
    assert view.recent(0).sum() == 0


def test_text_order_puts_invalid_entries_last():
    view = shuffled(6)
    view.valid = torch.tensor([True, False, True, True, False, True]).expand(2, 2, 6)
    order = view.text_order()
    sorted_positions = view.positions.gather(-1, order)[..., :4]
    assert bool((sorted_positions.diff(dim=-1) > 0).all())
    assert not view.valid.gather(-1, order)[..., 4:].any()


@pytest.mark.parametrize("width", [0, 3])
def test_make_view_places_queries_at_the_end(width):
    view = make_view(torch.zeros(1, 1, 5, 2), torch.zeros(1, 2, width, 2), budget=4)
    assert view.query_positions.tolist() == [list(range(5 - width, 5))]
    assert view.seen.tolist() == [5]
