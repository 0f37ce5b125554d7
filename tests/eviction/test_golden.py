"""The oracle: block attention of coming queries, and what it drops."""

from __future__ import annotations

import pytest
import torch
from support.fixtures import FIXTURES, K, Q

from kvbench.eviction.terms import golden
from kvbench.eviction.terms.golden import block_attention, golden_evictions, upcoming


def test_the_evictions_of_the_released_code():
    want = FIXTURES["golden_eviction"]
    budget, interval = want["params"]["C"], want["params"]["L"]
    attention = block_attention(Q[0], K[0], interval, budget + interval, scaling=K.shape[-1] ** -0.5)
    trace = golden_evictions(attention, budget, interval)
    assert trace.dropped.tolist() == want["evicted_positions_per_step_per_kv_head"]
    assert trace.candidates.shape == trace.scores.shape == (3, 2, budget)
    for step in range(3):
        for head in range(2):
            scores, gone = trace.scores[step, head], trace.dropped[step, head]
            dropped = torch.isin(trace.candidates[step, head], gone)
            assert float(scores[dropped].min()) >= float(scores[~dropped].max())  # large scores go


def slow(queries, keys, interval, first, scaling, softcap=None):
    """The whole matrix at once, and zeros behind a short last block."""
    heads, total, _ = keys.shape
    logits = torch.einsum("hgqd,hkd->hgqk", queries.view(heads, -1, *queries.shape[1:]), keys) * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    future = torch.ones(total, total, dtype=torch.bool).triu(1)
    weights = logits.masked_fill(future, float("-inf")).softmax(dim=-1).mean(dim=1)[:, first:]
    pad = -weights.shape[1] % interval
    weights = torch.cat([weights, weights.new_zeros(heads, pad, total)], dim=1)
    return weights.unflatten(1, (-1, interval)).mean(dim=2)


@pytest.mark.parametrize("scratch", [1, 200, 1 << 25])
@pytest.mark.parametrize(("interval", "first", "softcap"), [(8, 24, None), (7, 20, None), (16, 90, 2.0), (5, 0, None)])
def test_blocks_equal_the_whole_matrix(interval, first, softcap, scratch, monkeypatch):
    monkeypatch.setattr(golden, "SCRATCH_FLOATS", scratch)
    got = block_attention(Q[0], K[0], interval, first, scaling=0.25, softcap=softcap)
    want = slow(Q[0].double(), K[0].double(), interval, first, 0.25, softcap)
    torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-7)


def test_the_future_is_what_comes_from_a_block_on():
    attention = torch.tensor([[[0.1, 0.5], [0.7, 0.2], [0.3, 0.4]]])
    assert upcoming(attention).tolist() == [[[pytest.approx(0.7), 0.5], [pytest.approx(0.7), pytest.approx(0.4)],
                                             [pytest.approx(0.3), pytest.approx(0.4)]]]  # fmt: skip


def test_golden_by_hand():
    """Budget 3, interval 2, ten tokens: the newest two of a full cache do not compete."""
    attention = torch.zeros(1, 3, 10)
    attention[0, 0] = torch.tensor([0.1, 0.9, 0.2, 0.8, 0.1, 0, 0, 0, 0, 0])
    attention[0, 1] = torch.tensor([0.0, 0.0, 0.3, 0.1, 0.2, 0.4, 0.9, 0, 0, 0])
    attention[0, 2] = torch.tensor([0.0, 0.0, 0.1, 0.6, 0.0, 0.7, 0.2, 0.8, 0, 0])
    trace = golden_evictions(attention, budget=3, interval=2)
    # Of 0, 1, 2 the best future is 1's. Then 1, 3, 4 with (0, 0.6, 0.2). Then 3, 5, 6 with (0.6, 0.7, 0.2).
    assert trace.candidates.tolist() == [[[0, 1, 2]], [[1, 3, 4]], [[3, 5, 6]]]
    assert trace.dropped.tolist() == [[[0, 2]], [[1, 4]], [[3, 6]]]
    torch.testing.assert_close(-trace.scores, torch.tensor([[[0.1, 0.9, 0.3]], [[0.0, 0.6, 0.2]], [[0.6, 0.7, 0.2]]]))


def test_among_equals_the_older_goes():
    trace = golden_evictions(torch.zeros(2, 1, 7), budget=4, interval=2)
    assert trace.dropped.tolist() == [[[0, 1], [0, 1]]]


def test_a_sequence_that_fits_loses_nothing():
    trace = golden_evictions(torch.zeros(2, 1, 6), budget=4, interval=2)
    assert trace.candidates.shape == (0, 2, 4)
    assert trace.dropped.shape == (0, 2, 2)


def test_heads_choose_for_themselves():
    both = block_attention(Q[0], K[0], 16, 48, scaling=0.25)
    alone = block_attention(Q[0, 4:], K[0, 1:], 16, 48, scaling=0.25)
    assert torch.equal(golden_evictions(both, 32, 16).dropped[:, 1:], golden_evictions(alone, 32, 16).dropped)
