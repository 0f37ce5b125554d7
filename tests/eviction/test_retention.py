"""Geometric decay: the worth of entries in log space, and attention and occupancy under it."""

from __future__ import annotations

import math

import pytest
import torch
from support.fixtures import FIXTURES

from kvbench.eviction.retention import decay, gated_attention, log_gain, occupancy


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


@pytest.mark.parametrize(("form", "logits"), [("weight", [math.log(0.25) + 3, 2.0]), ("scale", [0.25 * 3, 2.0])])
def test_gated_attention_by_hand(form, logits):
    """One head, two keys: the older has retention 0.25 and logit 3 for the second query."""
    one = torch.ones(1, 1, 2, 1)
    keys, values = torch.tensor([3.0, 2.0]).view(1, 1, 2, 1), torch.tensor([1.0, 0.0]).view(1, 1, 2, 1)
    log_beta = torch.tensor([0.25, 0.9]).log().view(1, 1, 2)
    got = gated_attention(one, keys, values, log_beta, scaling=1.0, form=form)
    assert float(got[0, 0, 1, 0]) == pytest.approx(float(torch.tensor(logits).softmax(-1)[0]), rel=1e-6)
    assert float(got[0, 0, 0, 0]) == 1.0
