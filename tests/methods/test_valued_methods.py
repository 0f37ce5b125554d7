"""lagkv, caote and vase: small cases by hand, and against slow forms of their equations."""

from __future__ import annotations

import math

import pytest
import torch

from kvbench.errors import UserError
from kvbench.eviction import choose
from kvbench.eviction.options import check_budget
from kvbench.eviction.select import decide
from kvbench.eviction.view import make_view
from kvbench.registry import methods

LAGKV, CAOTE, VASE = (methods.get(name) for name in ("lagkv", "caote", "vase"))


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def kept(method, *views):
    """Positions that each head of each view keeps, the first sequence's."""
    return [
        sorted(p[k].tolist())
        for view, verdict in zip(views, decide(method, views))
        for p, k in zip(view.positions[0], verdict.keep[0])
    ]


# lagkv


def unevenness(x, part, lag, sinks):
    """Of entries [N, d] in partition `part`, in plain loops."""
    own, after = (x[sinks + i * lag : sinks + (i + 1) * lag].tolist() for i in (part, part + 1))
    spreads = []
    for entry in own:
        scaled = []
        for channel, number in enumerate(entry):
            low, high = min(row[channel] for row in after), max(row[channel] for row in after)
            scaled.append((number - low) / (high - low))
        mean = sum(scaled) / len(scaled)
        spreads.append(math.sqrt(sum((u - mean) ** 2 for u in scaled) / (len(scaled) - 1)))
    total = sum(map(math.exp, spreads))
    return [math.exp(s) / total for s in spreads]


def test_lagkv_ranks_entries_within_their_partition():
    """2 sinks, 3 partitions of 4 and a rest of 1: two partitions are scored, the last 5 entries stay."""
    keys, values = random(1, 1, 15, 3), random(1, 1, 15, 3, seed=1)
    score = LAGKV(sinks=2, lag=4, value_weight=0.5).score(make_view(keys, values=values, budget=10))[0, 0]
    assert score[:2].isinf().all()
    assert score[10:].isinf().all()
    for part in (0, 1):
        own = [a + 0.5 * b for a, b in zip(*(unevenness(x[0, 0], part, 4, 2) for x in (keys, values)))]
        ranks = [sum(other < s for other in own) / 4 for s in own]
        assert score[2 + 4 * part : 6 + 4 * part].tolist() == ranks


def test_lagkv_breaks_its_ties_by_age():
    """Of the two entries with each rank, the one of the newer partition stays."""
    view = make_view(random(1, 1, 15, 3), values=random(1, 1, 15, 3, seed=1), budget=10)
    score, [stay] = LAGKV(sinks=2, lag=4).score(view)[0, 0], kept(LAGKV(sinks=2, lag=4), view)
    best = [p for p in range(2, 10) if score[p] == 0.75]
    second = max(p for p in range(2, 10) if score[p] == 0.5)
    assert stay == sorted([0, 1, *best, second, *range(10, 15)])


def test_lagkv_compares_scores_on_request():
    view = make_view(random(1, 1, 15, 3), values=random(1, 1, 15, 3, seed=1), budget=10)
    score = LAGKV(sinks=2, lag=4, cross=True, value_weight=0).score(view)[0, 0]
    torch.testing.assert_close(score[2:6], torch.tensor(unevenness(view.keys[0, 0], 0, 4, 2)))


def test_lagkv_stands_a_constant_channel():
    keys = random(1, 2, 20, 4)
    keys[..., 1] = 3.0
    assert LAGKV(sinks=2, lag=4).score(make_view(keys, budget=12)).isnan().sum() == 0


def test_lagkv_at_a_rate_drops_a_partition_as_soon_as_the_next_is_full():
    method = LAGKV(form="rate", sinks=2, lag=4, keep=0.5)
    assert [method.allowed(None, 5, seen, 0) for seen in (9, 10, 13, 14, 18)] == [9, 8, 11, 10, 12]
    assert not method.takes_budget
    keys = random(1, 1, 14, 3)
    [first] = kept(method, make_view(keys[:, :, :10], budget=8))
    assert first[:2] == [0, 1]
    assert first[4:] == [6, 7, 8, 9]
    positions = torch.tensor([*first, *range(10, 14)])[None, None]
    later = make_view(keys[:, :, positions[0, 0]], positions=positions, budget=10)
    [second] = kept(method, later)
    assert second[:4] == first[:4]  # final: they are not scored again
    assert second[6:] == [10, 11, 12, 13]


def test_lagkv_refuses_budgets_that_leave_no_choice():
    assert LAGKV(sinks=4, lag=16).min_budget() == 36
    with pytest.raises(UserError, match="needs room for 36 entries"):
        check_budget("lagkv", LAGKV(lag=16), 35)


# caote


def output(paid, values):
    return (paid[:, None] * values).sum(dim=0) / paid.sum()


def test_caote_is_what_the_output_loses_with_a_token():
    keys, values, queries = random(1, 1, 9, 4), random(1, 1, 9, 4, seed=1), random(1, 1, 1, 4, seed=2)
    view = make_view(keys, queries, values=values, budget=5)
    paid = (keys[0, 0, :8] @ queries[0, 0, 0] / 2).softmax(dim=-1)
    whole = output(paid, values[0, 0, :8])
    without = [output(paid * (torch.arange(8) != j), values[0, 0, :8]) for j in range(8)]
    want = torch.stack([(whole - other).norm() for other in without])
    torch.testing.assert_close(CAOTE(window=1).score(view)[0, 0, :8], want)


def test_caote_squared_sums_the_errors_of_every_query():
    keys, values, queries = random(1, 1, 9, 4), random(1, 1, 9, 4, seed=1), random(1, 2, 3, 4, seed=2)
    view = make_view(keys, queries, values=values, budget=5)
    want = torch.zeros(9)
    for head in range(2):
        for i, position in enumerate((6, 7, 8)):
            paid = (keys[0, 0, : position + 1] @ queries[0, head, i] / 2).softmax(dim=-1)
            error = (output(paid, values[0, 0, : position + 1]) - values[0, 0, : position + 1]).norm(dim=-1)
            want[: position + 1] += (paid / (1 - paid + 1e-6) * error) ** 2 / 2
    score = CAOTE(form="squared", window=3, kernel=1).score(view)[0, 0]
    torch.testing.assert_close(score, want)
    pooled = torch.nn.functional.avg_pool1d(want[None], 3, stride=1, padding=1)[0]
    torch.testing.assert_close(CAOTE(form="squared", window=3, kernel=3).score(view)[0, 0], pooled)


def test_caote_has_windows_and_times_of_its_own_for_each_form():
    assert [CAOTE(form=form).protect(128).recent for form in ("mean", "squared")] == [64, 8]
    assert [CAOTE(form=form).decode_bounded for form in ("mean", "squared")] == [True, False]


# vase


def vase_view(**more):
    keys, values = random(1, 1, 40, 4), random(1, 1, 40, 4, seed=1)
    values[0, 0, [9, 20, 33]] *= 30
    return make_view(keys, random(1, 2, 4, 4, seed=2), values=values, **more)


def test_vase_keeps_values_of_large_range_and_sinks():
    method = VASE(window=4, sinks=2, large=5)
    for key in range(20):
        view = vase_view(budget=12)
        view.noise_key = torch.tensor([key])
        [stay] = kept(method, view)
        assert {0, 1, 9, 20, 33, 36, 37, 38, 39} <= set(stay)
        assert len(stay) == 12


def test_vase_counts_large_values_as_a_share_of_the_budget():
    """A quarter of 16 are 4, of which 2 are sinks; the third of the large values must be drawn."""
    seen = []
    for key in range(30):
        view = vase_view(budget=16)
        view.noise_key = torch.tensor([key])
        seen.append(set(kept(VASE(window=4, sinks=2), view)[0]))
    sure = set.intersection(*seen)
    assert len(sure & {9, 20, 33}) == 2
    assert sure == (sure & {9, 20, 33}) | {0, 1, 36, 37, 38, 39}


def test_vase_draws_in_proportion_to_attention():
    """One of two entries, with attention 3 : 1."""
    keys = torch.tensor([math.log(3.0), 0.0, 0.0]).view(1, 1, 3, 1)
    first = 0
    for key in range(600):
        view = make_view(keys, torch.ones(1, 1, 1, 1), budget=2)
        view.noise_key = torch.tensor([key])
        first += kept(VASE(window=1, sinks=0, large=0, kernel=1), view) == [[0, 2]]
    assert first / 600 == pytest.approx(0.75, abs=0.05)


def test_vase_without_a_draw_keeps_what_is_attended_to():
    view = vase_view(budget=12)
    paid = view.attend(domain="outside_window")[0, 0]
    [stay] = kept(VASE(window=4, sinks=0, large=0, kernel=1, draw=False), view)
    assert set(stay) == {*paid[:36].topk(8).indices.tolist(), 36, 37, 38, 39}


def test_vase_remembers_ranks_on_request():
    method = choose.make("vase", {"window": 4, "compat": "reference", "sinks": 1, "large": 3})
    [verdict] = decide(method, [vase_view(budget=12, columns={"rank": torch.full((1, 1, 40), float("nan"))})])
    rank = verdict.columns["rank"][0, 0]
    assert sorted(rank[~rank.isnan()].tolist()) == list(range(8))
    assert rank[0] == 0
    assert set(rank.isnan().logical_not().nonzero().flatten().tolist()) == set(
        verdict.keep[0, 0, :36].nonzero().flatten().tolist()
    )
