"""Losses of ForesightKV by hand; the released code's values are among the parity cases."""

from __future__ import annotations

import math

import pytest
import torch

from kvbench.eviction.terms.objectives import policy_loss, ranking_loss


def test_ranking_loss_by_hand():
    """Wanted order 2 > 0 > 1; pairs (2, 0), (2, 1), (0, 1) with margins 0.1 against differences 1, 0.05 and -0.95."""
    scores, wanted = torch.tensor([[0.0, 0.95, 1.0]]), torch.tensor([[0.5, 0.1, 0.9]])
    assert float(ranking_loss(scores, wanted, 0.1)) == pytest.approx((0 + 0.05 + 1.05) / 3)
    assert float(ranking_loss(wanted, wanted, 0.1)) == 0


def test_rows_without_an_order_do_not_count():
    scores = torch.tensor([[0.0, 1.0], [0.0, 1.0]], requires_grad=True)
    loss = ranking_loss(scores, torch.tensor([[1.0, 0.0], [0.5, 0.5]]), 0.5)
    assert loss.item() == pytest.approx(1.5)
    nothing = ranking_loss(scores, torch.zeros(2, 2), 0.01)
    nothing.backward()
    assert nothing.item() == 0
    assert float(scores.grad.abs().sum()) == 0


def test_ranking_loss_pulls_scores_into_order():
    scores = torch.zeros(1, 3, requires_grad=True)
    ranking_loss(scores, torch.tensor([[3.0, 1.0, 2.0]]), 0.1).backward()
    assert scores.grad[0, 0] < scores.grad[0, 2] < scores.grad[0, 1]  # descent raises the wanted ones


def test_policy_loss_by_hand():
    now, before, reference = torch.tensor([math.log(0.6)]), torch.tensor([math.log(0.4)]), torch.tensor([math.log(0.3)])
    loss, divergence = policy_loss(now, before, reference, torch.tensor([2.0]), clip=0.2, kl_weight=0.5)
    assert float(divergence) == pytest.approx(0.5 - math.log(0.5) - 1)
    assert float(loss) == pytest.approx(-1.2 * 2 + 0.5 * float(divergence))  # the ratio of 1.5 is clipped to 1.2
    loss, _ = policy_loss(now, before, reference, torch.tensor([-2.0]), clip=0.2, kl_weight=0.0)
    assert float(loss) == pytest.approx(1.5 * 2)  # not where that would hide a loss


def test_policy_loss_stays_finite():
    loss, _ = policy_loss(torch.tensor([0.0]), torch.tensor([-200.0]), torch.tensor([0.0]), torch.tensor([-1.0]))
    assert float(loss) == pytest.approx(math.exp(10), rel=1e-5)
