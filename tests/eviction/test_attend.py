"""The attention primitive against a triple loop, and the promises that keep it the same in every batch."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.eviction.terms import window_attention as attend
from kvbench.eviction.terms.window_attention import window_attention


def naive(queries, keys, qpos, kpos, valid, scaling, softcap, domain, order, reduce_g, reduce_q):
    """One query, one head, one key at a time, in float64."""
    b, hq, w, _ = queries.shape
    hk, n = keys.shape[1:3]
    g = hq // hk
    reduce = {"mean": lambda x: sum(x) / len(x), "sum": sum, "max": max, "min": min}
    out = torch.zeros(b, hk, n, dtype=torch.float64)
    for i, h in itertools.product(range(b), range(hk)):

        def logit(head, t, j, i=i, h=h):
            hidden = not valid[i, h, j] or kpos[i, h, j] > qpos[i, t]
            if domain == "outside_window":
                hidden = hidden or kpos[i, h, j] >= min(qpos[i])
            if hidden:
                return -math.inf
            z = float(queries[i, head, t].double() @ keys[i, h, j].double()) * scaling
            return z if softcap is None else softcap * math.tanh(z / softcap)

        def softmax(row):
            top = max(row)
            e = [0.0 if z == -math.inf else math.exp(z - top) for z in row]
            return [x / sum(e) if sum(e) else 0.0 for x in e]

        rows = []
        for t in range(w):
            logits = [[logit(h * g + a, t, j) for j in range(n)] for a in range(g)]
            if order == "group_then_softmax":
                merged = [reduce[reduce_g]([z[j] for z in logits]) for j in range(n)]
                rows.append(softmax(merged))
            else:
                p = [softmax(z) for z in logits]
                rows.append([reduce[reduce_g]([x[j] for x in p]) for j in range(n)])
        for j in range(n):
            out[i, h, j] = reduce[reduce_q]([row[j] for row in rows])
    return out


def inputs(b=2, hk=2, g=2, w=3, n=7, d=4, seed=0):
    """Entries in shuffled storage order, a few invalid, garbage in the invalid ones."""
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(b, hk * g, w, d, generator=generator)
    keys = torch.randn(b, hk, n, d, generator=generator)
    kpos = torch.stack([torch.randperm(n, generator=generator) for _ in range(b * hk)]).view(b, hk, n) * 2
    qpos = (2 * n - 1 - w + torch.arange(w)).expand(b, -1)
    valid = torch.rand(b, hk, n, generator=generator) < 0.8
    return queries, keys, qpos, kpos, valid


CHOICES = [
    {"domain": domain, "order": order, "reduce_g": reduce_g, "reduce_q": reduce_q}
    for domain in ("all", "outside_window")
    for order in ("softmax_then_group", "group_then_softmax")
    for reduce_g in ("mean", "sum", "max")
    for reduce_q in ("mean", "sum", "max", "min")
]


@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: "-".join(c.values()))
def test_matches_triple_loop(choice):
    queries, keys, qpos, kpos, valid = inputs(seed=len(str(choice)))
    got = window_attention(queries, keys, qpos, kpos, valid, scaling=0.5, **choice)
    want = naive(queries, keys, qpos, kpos, valid, 0.5, None, **choice)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(
    b=st.integers(1, 2), hk=st.integers(1, 2), g=st.integers(1, 3), w=st.integers(1, 4), n=st.integers(1, 6),
    softcap=st.sampled_from([None, 1.5]), choice=st.sampled_from(CHOICES), seed=st.integers(0, 99),
)  # fmt: skip
def test_matches_triple_loop_in_every_shape(b, hk, g, w, n, softcap, choice, seed):
    queries, keys, qpos, kpos, valid = inputs(b, hk, g, w, n, seed=seed)
    got = window_attention(queries, keys, qpos, kpos, valid, scaling=0.7, softcap=softcap, **choice)
    want = naive(queries, keys, qpos, kpos, valid, 0.7, softcap, **choice)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("choice", CHOICES[:12], ids=lambda c: "-".join(c.values()))
def test_blocks_do_not_change_the_result(choice, monkeypatch):
    whole = window_attention(*inputs(w=5), scaling=0.5, **choice)
    monkeypatch.setattr(attend, "SCRATCH_FLOATS", 60)  # two query rows of one sequence at a time
    torch.testing.assert_close(window_attention(*inputs(w=5), scaling=0.5, **choice), whole)


def test_kept_axes():
    queries, keys, qpos, kpos, valid = inputs()
    full = window_attention(queries, keys, qpos, kpos, valid, scaling=0.5, reduce_g=None, reduce_q=None)
    assert full.shape == (2, 2, 2, 3, 7)
    rows = window_attention(queries, keys, qpos, kpos, valid, scaling=0.5, reduce_g="max", reduce_q=None)
    torch.testing.assert_close(rows, full.amax(dim=2))
    heads = window_attention(queries, keys, qpos, kpos, valid, scaling=0.5, reduce_g=None, reduce_q="mean")
    torch.testing.assert_close(heads, full.mean(dim=3))


def test_a_query_that_sees_nothing_pays_nothing():
    queries, keys, qpos, kpos, valid = inputs()
    blind = torch.full_like(qpos, -1)
    assert not window_attention(queries, keys, blind, kpos, valid, scaling=1.0).any()
    assert not window_attention(queries, keys, qpos, kpos, torch.zeros_like(valid), scaling=1.0).any()


def test_no_query_sums_to_zeros():
    queries, keys, qpos, kpos, valid = inputs()
    out = window_attention(queries[:, :, :0], keys, qpos[:, :0], kpos, valid, scaling=1.0, reduce_q="sum")
    assert out.shape == kpos.shape
    assert not out.any()


def test_garbage_in_invalid_entries_is_never_read():
    queries, keys, qpos, kpos, valid = inputs()
    want = window_attention(queries, keys, qpos, kpos, valid, scaling=0.5)
    dirty = torch.where(valid[..., None], keys, torch.nan)
    assert torch.equal(window_attention(queries, dirty, qpos, kpos, valid, scaling=0.5), want)


def test_a_sequence_alone_gives_the_same_bits():
    arguments = inputs(b=8, w=6, n=40, d=16)
    for choice in (CHOICES[0], CHOICES[-1]):
        together = window_attention(*arguments, scaling=0.5, **choice)
        for i in range(8):
            alone = window_attention(*(a[i : i + 1] for a in arguments), scaling=0.5, **choice)
            assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("reduce_g", ["mean", "sum", "max", None])
@pytest.mark.parametrize("floats", [attend.SCRATCH_FLOATS, 1], ids=["at once", "query by query"])
def test_sums_over_the_newest_queries(reduce_g, floats, monkeypatch):
    """Each equals the sum over these queries alone; more than there are means all."""
    monkeypatch.setattr(attend, "SCRATCH_FLOATS", floats)
    queries, keys, qpos, kpos, valid = inputs(w=5)
    more = {"scaling": 0.5, "reduce_g": reduce_g, "reduce_q": "sum"}
    sums = window_attention(queries, keys, qpos, kpos, valid, newest=(1, 3, 9), **more)
    for at, count in enumerate((1, 3, 5)):
        some = window_attention(queries[:, :, -count:], keys, qpos[:, -count:], kpos, valid, **more)
        torch.testing.assert_close(sums[..., at, :], some)
    with pytest.raises(ValueError, match="reduce_q"):
        window_attention(queries, keys, qpos, kpos, valid, newest=(1,), scaling=0.5)
