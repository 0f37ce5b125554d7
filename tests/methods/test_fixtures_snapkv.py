"""SnapKV, PyramidKV and Ada-KV: results of the released code on closed-form inputs, as in test_fixtures.py."""

from __future__ import annotations

import pytest
from support.fixtures import BUDGET, FIXTURES, WINDOW, K, Q

from kvbench.eviction.select import decide
from kvbench.eviction.view import make_view
from kvbench.registry import methods


def kept(method, view):
    keep = decide(method, [view])[0].keep
    return [view.positions[0, head][keep[0, head]].tolist() for head in range(keep.shape[1])]


@pytest.mark.parametrize("reduce_g", ["mean", "max"])
def test_snapkv_with_a_cache_for_every_kv_head(reduce_g):
    method = methods.get("snapkv")(window=WINDOW, kernel=7, pool="max", reduce_g=reduce_g)
    view = make_view(K, Q[:, :, -WINDOW:], budget=BUDGET)
    score = method.score(view)
    for head, want in enumerate(FIXTURES[f"snapkv_kvhead_{reduce_g}"]["kept"]):
        got = kept(method, view)[head]
        assert len(got) == len(want)
        swapped = sorted(set(got) ^ set(want))  # max pooling makes ties, and only tied entries may differ
        assert score[0, head, swapped].unique().numel() <= 1


def test_snapkv_with_a_cache_for_every_query_head():
    method = methods.get("snapkv")(window=WINDOW, kernel=5, pool="avg", heads="query")
    assert method.per_query_head
    view = make_view(K.repeat_interleave(4, dim=1), Q[:, :, -WINDOW:], budget=BUDGET)
    assert kept(method, view) == FIXTURES["snapkv_official"]["kept_per_query_head"]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("floor_alpha", [0.2, 0.5])
def test_ada_kv_lengths(floor_alpha, normalize):
    fixture = FIXTURES[f"adakv_floor{floor_alpha}_norm{normalize}"]
    method = methods.get("ada-kv")(
        base="snapkv(window=8, kernel=7)", floor_alpha=floor_alpha, normalize=normalize, rounding="official"
    )
    lengths = [len(head) for head in kept(method, make_view(K, Q[:, :, -WINDOW:], budget=BUDGET))]
    assert lengths == fixture["entries_per_kv_head_incl_window"]


def test_pyramidkv_lengths():
    fixture = FIXTURES["pyramidkv_entries_per_layer"]
    p = fixture["params"]
    method = methods.get("pyramidkv")(window=p["w"], beta=p["beta"], rounding="official")
    assert method.ideal_sizes(p["C"], p["T"], p["layers"]) == fixture["entries"]
    # The released code's own sum is above the budget.
    sizes = method.layer_sizes(p["C"], p["T"], p["layers"])
    assert sum(sizes) == p["C"] * p["layers"] < sum(fixture["entries"])
    assert all(0 <= want - size <= 2 for want, size in zip(fixture["entries"], sizes))
