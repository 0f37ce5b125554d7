"""The global score in other methods than gkv, and h2o's sums for every query head."""

from __future__ import annotations

import pytest
import torch

from kvbench.errors import UserError
from kvbench.eviction.view import make_view
from kvbench.registry import methods

BUDGET = 24


def test_snapkv_with_a_global_score_is_gkv_with_pooling(stream, evictions):
    queries, keys = stream()
    for form in ("max", "mean", "sum"):
        one = methods.get("snapkv-decode")(variant="gkv", window=6, kernel=5, global_score=form)
        other = methods.get("gkv")(window=6, kernel=5, form=form, redundancy=False)
        runs = [evictions(m, queries, keys, budget=BUDGET, interval=16, prompt=42) for m in (one, other)]
        assert all(torch.equal(a, b) for a, b in zip(*runs))
        local = methods.get("snapkv-decode")(variant="gkv", window=6, kernel=5)
        plain = evictions(local, queries, keys, budget=BUDGET, interval=16, prompt=42)
        assert torch.equal(plain[0], runs[0][0])  # dividing by a maximum changes no ranking
        assert not torch.equal(plain[-1], runs[0][-1])


@pytest.mark.parametrize("name", ["snapkv-decode", "rkv"])
def test_the_stored_score_is_not_pooled(name, stream):
    queries, keys = stream()
    memory = torch.full(keys.shape[:3], torch.nan)
    view = make_view(keys, queries[:, :, -8:], budget=BUDGET, columns={"memory": memory})
    stored = methods.get(name)(global_score="max").score(view).columns["memory"]
    votes = view.attend(domain="outside_window", order="group_then_softmax", reduce_g="max", reduce_q="mean")
    older = votes[..., :-8]
    torch.testing.assert_close(stored[..., :-8], older / older.amax(dim=-1, keepdim=True))
    assert bool(stored[..., -8:].isnan().all())
    with pytest.raises(UserError, match="global_score"):
        methods.get(name)(global_score="max", compat="reference")


def test_rkv_with_a_global_score_balances_attention_and_redundancy(stream):
    queries, keys = stream()
    memory = torch.full(keys.shape[:3], torch.nan)
    view = make_view(keys, queries[:, :, -8:], budget=BUDGET, columns={"memory": memory})
    ends = [methods.get("rkv")(global_score="max", lam=lam).score(view).score[..., :-8] for lam in (0.0, 0.5, 1.0)]
    torch.testing.assert_close(ends[0].amin(dim=-1), torch.full(keys.shape[:2], -1.0))
    torch.testing.assert_close(ends[2].amax(dim=-1), torch.ones(keys.shape[:2]))
    torch.testing.assert_close(ends[1], (ends[0] + ends[2]) / 2)


def test_h2o_takes_the_maximum_of_sums():
    generator = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(1, 4, 20, 8, generator=generator), torch.randn(1, 2, 20, 8, generator=generator)
    method = methods.get("h2o")(reduce_g="max", group=2)
    zeros = {c.name: torch.zeros(1, 2, 20) for c in method.columns()}
    once = make_view(keys, queries, columns=zeros, budget=9)
    want = once.attend(reduce_g=None, reduce_q="sum").amax(dim=2)
    once.columns = method.observe(once)
    torch.testing.assert_close(method.score(once), want)
    half = make_view(keys[:, :, :12], queries[:, :, :12], columns={n: c[..., :12] for n, c in zeros.items()}, budget=9)
    columns = {n: torch.cat([c, torch.zeros(1, 2, 8)], dim=-1) for n, c in method.observe(half).items()}
    twice = make_view(keys, queries[:, :, 12:], columns=columns, budget=9)
    twice.columns = method.observe(twice)
    torch.testing.assert_close(method.score(twice), want)
    with pytest.raises(UserError, match="group"):
        methods.get("h2o")(reduce_g="max", group=3).observe(once)
