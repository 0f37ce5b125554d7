"""Geometric decay: the worth of entries in log space, and attention and occupancy under it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from support.fixtures import FIXTURES

from kvbench.eviction.terms.retention import decay, gated_attention, log_gain, occupancy


@pytest.mark.parametrize("case", FIXTURES["logG"])
def test_log_gain_of_the_released_code(case):
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2e-6)):
        log_beta = torch.tensor(math.log(case["beta"]), dtype=dtype)
        got = log_gain(log_beta, torch.tensor(case["t"] + 1 - case["p"]), case["n"])
        assert float(got) == pytest.approx(case["logG"], rel=tolerance, abs=tolerance)
        assert float(got) == pytest.approx(case["direct"], rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("horizon", [1, 2, 7, 100])
@pytest.mark.parametrize("beta", [1e-6, 0.3, 0.7, 0.9999])
def test_log_gain_is_a_sum_of_powers(beta, horizon):
    age = torch.tensor([1, 5, 40])
    direct = sum(beta ** (age.double() + k) for k in range(horizon)).log()
    got = log_gain(torch.full((3,), math.log(beta), dtype=torch.float64), age, horizon)
    torch.testing.assert_close(got, direct, rtol=1e-9, atol=1e-9)


def test_log_gain_at_its_limits():
    still = torch.tensor([0.0, -1e-12, -1e-9])  # beta as good as 1: n queries' worth
    torch.testing.assert_close(log_gain(still, torch.tensor(50), 16), torch.full((3,), math.log(16)))
    gone = log_gain(torch.tensor([-90.0, -1e4]), torch.tensor(3), 16)  # beta as good as 0: the first power alone
    assert gone.tolist() == [-270.0, -3e4]
    forever = log_gain(torch.tensor(math.log(0.9), dtype=torch.float64), torch.tensor(2), 10**6)
    assert float(forever) == pytest.approx(math.log(0.9**2 / 0.1))


def test_decay_and_occupancy():
    log_beta = torch.tensor([[0.5, 0.8, 0.1]], dtype=torch.float64).log()
    want = torch.tensor([[[1, 0, 0], [0.5, 1, 0], [0.25, 0.8, 1]]], dtype=torch.float64)
    torch.testing.assert_close(decay(log_beta), want)
    torch.testing.assert_close(occupancy(log_beta), want.sum(dim=-1))


@pytest.mark.parametrize("block", [1, 7, 32, 1000])
def test_occupancy_is_the_same_in_any_blocks(block):
    log_beta = -torch.rand(2, 3, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(occupancy(log_beta, block=block), decay(log_beta).sum(dim=-1))


def test_occupancy_has_one_gradient_in_any_blocks():
    weight = torch.rand(3, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = []
    for block in (1000, 16, 7):
        log_beta = -torch.rand(3, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        log_beta.requires_grad_(True)
        (occupancy(log_beta, block=block) * weight).sum().backward()
        found.append(log_beta.grad)
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


@pytest.fixture
def stream():
    g = torch.Generator().manual_seed(3)
    return (torch.randn(2, heads, 9, 4, generator=g, dtype=torch.float64) for heads in (4, 2, 2))


@pytest.mark.parametrize("form", ["weight", "scale"])
def test_attention_that_does_not_fade_is_attention(stream, form):
    q, k, v = stream
    got = gated_attention(q, k, v, torch.zeros(2, 2, 9), scaling=0.5, form=form)
    more = {"is_causal": True, "scale": 0.5, "enable_gqa": True}
    torch.testing.assert_close(
        got, torch.nn.functional.scaled_dot_product_attention(q, k, v, **more), rtol=1e-5, atol=1e-6
    )


def test_only_the_weighted_form_ends_in_an_eviction(stream):
    """beta = 0 leaves a query nothing but its own entry; scaled logits become 0 instead, which is still attended to."""
    q, k, v = stream
    nothing = torch.full((2, 2, 9), -1e9)
    own = v.repeat_interleave(2, dim=1)
    torch.testing.assert_close(gated_attention(q, k, v, nothing, scaling=0.5), own, rtol=1e-5, atol=1e-6)
    scaled = gated_attention(q, k, v, nothing, scaling=0.5, form="scale")
    assert not torch.allclose(scaled[:, :, 1:], own[:, :, 1:], atol=1e-2)


def test_entries_that_fade_at_once_are_evicted(stream):
    """beta is 0 or 1: every query attends to its own entry and to those that stay, as if the others were not there."""
    q, k, v = stream
    stays = torch.rand(2, 2, 9, generator=torch.Generator().manual_seed(7)) < 0.5
    got = gated_attention(q, k, v, torch.where(stays, 0.0, -1e9), scaling=0.5)
    for b, head, t in itertools.product(range(2), range(4), range(9)):
        held = [j for j in range(t + 1) if stays[b, head // 2, j] or j == t]
        weights = (k[b, head // 2, held] @ q[b, head, t] * 0.5).softmax(dim=0)
        torch.testing.assert_close(got[b, head, t], weights @ v[b, head // 2, held], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["weight", "scale"])
def test_a_part_of_the_queries(stream, form):
    q, k, v = stream
    log_beta = -torch.rand(2, 2, 9, generator=torch.Generator().manual_seed(5))
    whole = gated_attention(q, k, v, log_beta, scaling=0.5, form=form, softcap=3.0)
    part = gated_attention(
        q[:, :, 4:7], k[:, :, :7], v[:, :, :7], log_beta[..., :7], scaling=0.5, form=form, first=4, softcap=3.0
    )
    torch.testing.assert_close(part, whole[:, :, 4:7])


def test_bounded_logits_and_a_key_without_a_value(stream):
    """By hand: the bound comes before the fading, as the model's own does before its mask."""
    q, k, v = stream
    log_beta = -torch.rand(2, 2, 9, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    sinks = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)
    got = gated_attention(q, k, v, log_beta, scaling=0.5, softcap=2.0, sinks=sinks)
    for b, head, t in itertools.product(range(2), range(4), range(9)):
        kv = head // 2
        logits = 2 * torch.tanh(k[b, kv, : t + 1] @ q[b, head, t] * 0.5 / 2)
        logits = logits + log_beta[b, kv, : t + 1] * torch.arange(t, -1, -1)
        weights = torch.cat([logits, sinks[head, None]]).softmax(dim=0)[:-1]
        torch.testing.assert_close(got[b, head, t], weights @ v[b, kv, : t + 1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("form", "logits"), [("weight", [math.log(0.25) + 3, 2.0]), ("scale", [0.25 * 3, 2.0])])
def test_gated_attention_by_hand(form, logits):
    """One head, two keys: the older has retention 0.25 and logit 3 for the second query."""
    one = torch.ones(1, 1, 2, 1)
    keys, values = torch.tensor([3.0, 2.0]).view(1, 1, 2, 1), torch.tensor([1.0, 0.0]).view(1, 1, 2, 1)
    log_beta = torch.tensor([0.25, 0.9]).log().view(1, 1, 2)
    got = gated_attention(one, keys, values, log_beta, scaling=1.0, form=form)
    assert float(got[0, 0, 1, 0]) == pytest.approx(float(torch.tensor(logits).softmax(-1)[0]), rel=1e-6)
    assert float(got[0, 0, 0, 0]) == 1.0
