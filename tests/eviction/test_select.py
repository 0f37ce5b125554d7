"""Selection against sorting by (score, position) in Python: ties, signed zeros, infinities, protection, scopes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.errors import BudgetViolation
from kvbench.eviction.api import Protect
from kvbench.eviction.select import check, keep_mask, order_key, protected

SCORES = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, 1e-45, -1e-45]),
    st.floats(width=32, allow_nan=False),
)


@st.composite
def layers(draw):
    """Scores, positions (unique in a head), valid and must marks of [2, 2, N]; few distinct scores, so ties abound."""
    n = draw(st.integers(1, 9))
    pool = draw(st.lists(SCORES, min_size=1, max_size=4))
    pick = lambda of: torch.tensor(draw(st.lists(of, min_size=4 * n, max_size=4 * n))).view(2, 2, n)  # noqa: E731
    score = pick(st.sampled_from(pool)).float()
    positions = torch.stack([torch.tensor(draw(st.permutations(range(n)))) for _ in range(4)]).view(2, 2, n)
    valid, must = pick(st.booleans()), pick(st.booleans())
    return score, positions, valid, must & valid, draw(st.integers(1, n + 1))


def by_sorting(score, positions, valid, must, count):
    """Indices of one row that stay: protected first, then the larger score, then the newer entry."""
    order = sorted(
        (i for i in range(len(score)) if valid[i]),
        key=lambda i: (bool(must[i]), float(score[i]) + 0.0, int(positions[i])),
        reverse=True,
    )
    return set(order[:count])


@settings(max_examples=200, deadline=None)
@given(layers())
def test_head_scope_is_a_sort(layer):
    score, positions, valid, must, count = layer
    keep = keep_mask(score, positions, valid, must, count)
    for i, h in ((0, 0), (0, 1), (1, 0), (1, 1)):
        rows = [x[i, h] for x in (score, positions, valid, must)]
        want = by_sorting(*rows, count)
        got = set(keep[i, h].nonzero().flatten().tolist())
        if int(must[i, h].sum()) <= count:
            assert got == want
        else:
            assert len(got) == count  # more protected than fits: `check` refuses it


@settings(max_examples=100, deadline=None)
@given(layers())
def test_shared_scopes_compete_over_heads(layer):
    score, positions, valid, must, count = layer
    keep = keep_mask(score, positions, valid, must, count, scope="layer")
    for i in range(2):
        flat = [x[i].flatten() for x in (score, positions, valid, must)]
        heads = score.shape[1]
        size = min(heads * count, int(flat[2].sum()))
        assert int(keep[i].sum()) == size
        ranks = [
            (must, float(score) + 0.0, int(position)) if not must else (True, 0.0, 0)
            for score, position, _, must in zip(*flat)
        ]
        # Every head's best entry stays, whatever those of other heads score.
        width = score.shape[2]
        for head in range(heads):
            mine = [j for j in range(head * width, (head + 1) * width) if flat[2][j]]
            if mine:
                best = max(mine, key=lambda j: ranks[j])
                ranks[best] = (True, 0.0, 0)
        stays = keep[i].flatten().tolist()
        kept = [rank for rank, stay in zip(ranks, stays) if stay]
        left = [rank for rank, stay, usable in zip(ranks, stays, flat[2].tolist()) if usable and not stay]
        assert not left or max(left) <= min(kept)


def test_equal_scores_keep_the_newer():
    score = torch.tensor([0.0, -0.0, 0.0, -0.0]).view(1, 1, 4)
    positions = torch.tensor([7, 3, 9, 5]).view(1, 1, 4)
    keep = keep_mask(score, positions, torch.ones_like(positions, dtype=torch.bool), None, 2)
    assert keep[0, 0].tolist() == [True, False, True, False]


def test_equal_score_and_position_in_two_heads_is_decided():
    score = torch.zeros(1, 4, 50)
    positions = torch.arange(50).expand(1, 4, 50)
    valid = torch.ones_like(positions, dtype=torch.bool)
    keep = keep_mask(score, positions, valid, None, 13, scope="layer")
    assert keep.sum() == 52
    assert keep[0].sum(dim=-1).tolist() == [13, 13, 13, 13]
    keep = keep_mask(score[:, :3], positions[:, :3], valid[:, :3], None, 1, scope="layer")
    assert keep[0, :, 49].tolist() == [True, True, True]
    keep = keep_mask(score[:, :2, :3], positions[:, :2, :3], valid[:, :2, :3], None, 2, scope="layer")
    assert keep[0].tolist() == [[False, True, True], [False, True, True]]


def test_nan_scores_are_refused_but_not_in_unused_storage():
    score = torch.tensor([1.0, torch.nan, 2.0]).view(1, 1, 3)
    positions = torch.arange(3).view(1, 1, 3)
    valid = torch.tensor([True, False, True]).view(1, 1, 3)
    assert keep_mask(score, positions, valid, None, 1)[0, 0].tolist() == [False, False, True]
    with pytest.raises(BudgetViolation, match="NaN"):
        keep_mask(score, positions, torch.ones_like(valid), None, 1)


def test_order_key_orders_like_floats():
    scores = torch.tensor([-math.inf, -3.0, -1e-45, -0.0, 0.0, 1e-45, 2.0, math.inf])
    key = order_key(scores, torch.zeros(8, dtype=torch.int64))
    assert key.tolist() == sorted(key.tolist())
    assert key[3] == key[4]


def test_protected():
    positions = torch.tensor([9, 0, 5, 1, 8]).view(1, 1, 5)
    seen, prompt = torch.tensor([10]), torch.tensor([6])
    mask = lambda p: protected(p, positions, seen, prompt)  # noqa: E731
    assert mask(Protect()) is None
    assert mask(Protect(sinks=1))[0, 0].tolist() == [False, True, False, False, False]
    assert mask(Protect(recent=2))[0, 0].tolist() == [True, False, False, False, True]
    assert mask(Protect(prompt=True))[0, 0].tolist() == [False, True, True, True, False]
    assert mask(Protect(sinks=2, recent=1))[0, 0].tolist() == [True, True, False, True, False]
    valid = torch.tensor([False, True, True, True, True]).view(1, 1, 5)
    assert protected(Protect(recent=2), positions, seen, prompt, valid)[0, 0].tolist() == [False] * 4 + [True]


def test_check_names_the_broken_promise():
    keep = torch.tensor([[[[True, False], [True, True]]]])
    must = torch.tensor([[[[False, True], [False, False]]]])
    check([keep], [None], 2, 2)
    with pytest.raises(BudgetViolation, match="protected"):
        check([keep], [must], 2, 2)
    with pytest.raises(BudgetViolation, match="exceeded"):
        check([keep], [None], 1, 1)
    with pytest.raises(BudgetViolation, match="fewer than 2"):
        check([keep], [None], 2, 2, min_entries=2)


def test_quotas_keep_their_own_number_in_every_head():
    generator = torch.Generator().manual_seed(5)
    score = torch.randint(0, 4, (3, 4, 20), generator=generator).float()
    positions = torch.stack([torch.randperm(20, generator=generator) for _ in range(12)]).view(3, 4, 20)
    valid = torch.ones_like(positions, dtype=torch.bool)
    quotas = torch.randint(1, 20, (3, 4), generator=generator)
    keep = keep_mask(score, positions, valid, None, quotas)
    assert keep.sum(-1).equal(quotas)
    for b in range(3):
        for h in range(4):
            one = keep_mask(
                score[b : b + 1, h : h + 1], positions[b : b + 1, h : h + 1], valid[:1, :1], None, int(quotas[b, h])
            )
            assert keep[b, h].equal(one[0, 0])
