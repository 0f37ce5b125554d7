"""chunkkv: runs by their mean over heads, the base's protection first, and the run in which the budget ends."""

from __future__ import annotations

import pytest
import torch
from kvbench.methods.chunkkv import by_run, in_whole_runs, run_ranks

from kvbench.errors import UserError
from kvbench.eviction.select import decide
from kvbench.eviction.view import make_view
from kvbench.registry import methods

# Two heads of 12 tokens; knorm scores a key by its negative norm.
NORMS = torch.tensor([[1.0, 1, 1, 8, 2, 2, 2, 2, 9, 9, 9, 1], [3, 3, 3, 8, 3, 2, 2, 2, 9, 9, 9, 1]])


def kept(budget, base="knorm", norms=NORMS, order=None, **options):
    keys = norms[None, :, :, None]
    positions = torch.arange(norms.shape[1]).expand(1, *norms.shape)
    if order is not None:
        keys, positions = keys[:, :, order], positions[..., order]
    view = make_view(keys, positions=positions, budget=budget)
    [decision] = decide(methods.get("chunkkv")(base=base, chunk=4, **options), [view])
    pairs = zip(positions[0], decision.keep[0])
    return [sorted(row[stays].tolist()) for row, stays in pairs]


def test_the_best_runs_stay_in_all_heads():
    """Sums over both heads: 28, 17 and 56; head 0 alone would rank the first run second too."""
    assert kept(4) == [[4, 5, 6, 7]] * 2
    assert kept(8) == [[*range(8)]] * 2
    assert kept(8, norms=NORMS.flip(0)) == [[*range(8)]] * 2


def test_the_last_run_is_trimmed_by_the_scores_of_the_base():
    assert kept(6) == [[1, 2, 4, 5, 6, 7]] * 2  # of equal scores the newer stays
    assert kept(10) == [[*range(8), 10, 11]] * 2
    assert kept(2) == [[6, 7]] * 2
    assert kept(1, norms=torch.tensor([[1.0, 2, 3], [3, 2, 1]])) == [[0], [2]]  # one run: the base decides


def test_whole_runs_only():
    assert kept(7, whole=True) == [[4, 5, 6, 7]] * 2
    assert kept(8, whole=True) == [[*range(8)]] * 2
    assert kept(3, whole=True) == kept(3)  # no run fits


def test_runs_with_protected_tokens_come_first():
    assert kept(5, base="knorm(recent=1)") == [[7, 8, 9, 10, 11], [7, 8, 9, 10, 11]]
    assert kept(9, base="knorm(recent=1)", whole=True) == [[*range(4, 12)]] * 2


def test_storage_order_does_not_matter():
    order = torch.randperm(12, generator=torch.Generator().manual_seed(3))
    for options in ({}, {"whole": True}, {"base": "knorm(recent=3)"}):
        assert kept(6, order=order, **options) == kept(6, **options)


def test_runs_are_those_of_the_text_after_an_eviction():
    """Entries 0, 1, 2, 9, 10, 11 in storage: two runs, not one of four and one of two."""
    score = torch.tensor([[[1.0, 1, 1, 2, 2, 2]]])
    positions = torch.tensor([[[0, 1, 2, 9, 10, 11]]])
    valid, none = torch.ones_like(positions, dtype=torch.bool), torch.zeros_like(positions, dtype=torch.bool)
    rank = run_ranks(score, positions, valid, none, 4, 12)
    assert rank.tolist() == [[[1, 1, 1, 0, 0, 0]]]
    order = by_run(score, positions, rank)
    assert positions.gather(-1, order).tolist() == [[[11, 10, 9, 2, 1, 0]]]
    assert [int(in_whole_runs(rank.gather(-1, order), budget)) for budget in (2, 3, 5, 6)] == [0, 3, 3, 6]


def test_an_infinite_score_counts_as_the_largest_finite_one():
    inf = float("inf")
    positions, none = torch.arange(8).expand(1, 2, -1), torch.zeros(1, 2, 8, dtype=torch.bool)
    score = torch.tensor([[[5.0, 5, 5, 5, inf, 0, 0, 0], [4.0, 4, 4, 4, inf, 0, 0, 0]]])
    finite = score.clamp(max=5)
    for given in (score, finite):
        rank = run_ranks(given, positions, ~none, none, 4, 8)
        assert rank.tolist() == [[[0, 0, 0, 0, 1, 1, 1, 1]] * 2]
    rank = run_ranks(torch.full_like(score, inf), positions, ~none, none, 4, 8)
    assert bool((rank[..., :4] > rank[..., 4:]).all())  # of equal scores the newer stays


@pytest.mark.parametrize(
    ("base", "why"),
    [
        ("gvk", "must name a method: "),
        ("pyramidkv", "gives all heads equal budgets"),
        ("retention", "gives all heads equal budgets"),
        ("triattention", "gives all heads equal budgets"),
        ("full", "gives all heads equal budgets"),
        ("snapkv+gkv", "must name one method, not two combined methods"),
        ("chunkkv", "gives every entry a score of its own"),
        ("rkv(compat=reference)", "gives every entry a score of its own"),
    ],
)
def test_bases_that_are_refused(base, why):
    with pytest.raises(UserError, match=why):
        methods.get("chunkkv")(base=base)
