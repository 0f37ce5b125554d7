"""The capacity loss against plain loops over sequences, layers, heads and times."""

from __future__ import annotations

import pytest
import torch

from kvbench.eviction.terms.capacity import capacity_loss


def drawn(b, layers, heads, t, seed=0):
    g = torch.Generator().manual_seed(seed)
    return -torch.rand(b, layers, heads, t, generator=g, dtype=torch.float64) * 0.3


def alive(log_beta, time):
    """Of one head, at the token with this index."""
    return sum(float(log_beta[i].exp()) ** (time - i) for i in range(time + 1))


def mean(terms):
    return sum(terms) / len(terms) if terms else 0.0


def of_heads(log_beta, budget, hinge):
    """One sequence; every head of every layer against the budget."""
    terms = []
    for layer in log_beta:
        for head in layer:
            for time in range(len(head)):
                excess, seen = max(0.0, alive(head, time) - budget), time + 1
                terms.append(excess / seen if hinge == "paper" else excess / max(1, seen - budget))
    return mean(terms if hinge == "paper" else [x for x in terms if x > 0])


def of_model(log_beta, budget, hinge):
    """One sequence; all heads of all layers against one budget."""
    layers, heads, length = log_beta.shape
    whole = budget * layers * heads
    terms = []
    for time in range(length):
        total = sum(alive(head, time) for layer in log_beta for head in layer)
        excess, most = max(0.0, total - whole), (time + 1) * layers * heads
        terms.append(excess / most if hinge == "paper" else excess / max(1, most - whole))
    return mean(terms if hinge == "paper" else [x for x in terms if x > 0])


@pytest.mark.parametrize("shape", [(1, 1, 1, 9), (2, 3, 2, 12), (3, 2, 4, 7), (1, 4, 1, 20)])
@pytest.mark.parametrize("budget", [1, 4])
@pytest.mark.parametrize("hinge", ["released", "paper"])
@pytest.mark.parametrize(("over", "loop"), [("head", of_heads), ("model", of_model)])
def test_against_a_loop(shape, budget, hinge, over, loop):
    log_beta = drawn(*shape)
    wanted = [loop(one, budget, hinge) for one in log_beta]
    assert capacity_loss(log_beta, budget, over=over, hinge=hinge).tolist() == pytest.approx(wanted, rel=1e-9)
    assert max(wanted) > 0


def test_only_the_shared_budget_can_be_moved_between_heads():
    """One head holds everything and the others nothing: too much for itself, and not for all of them together."""
    log_beta = torch.full((1, 2, 2, 10), -50.0)
    log_beta[0, 1, 0] = 0.0
    assert float(capacity_loss(log_beta, 4, over="head")) == pytest.approx(1.0)  # of its own excess, all
    assert float(capacity_loss(log_beta, 4, over="model")) == 0.0  # 10 + 3 of 16


@pytest.mark.parametrize("over", ["head", "model"])
def test_nothing_forgotten_is_1_and_a_budget_that_holds_all_costs_nothing(over):
    kept = torch.zeros(2, 3, 2, 16, requires_grad=True)
    assert capacity_loss(kept, 5, over=over).tolist() == pytest.approx([1.0, 1.0])
    free = capacity_loss(kept, 16, over=over)
    assert free.tolist() == [0.0, 0.0]
    free.sum().backward()
    assert not bool(kept.grad.any())  # no division by the number of no terms


@pytest.mark.parametrize("over", ["head", "model"])
def test_the_gradient_asks_to_forget(over):
    log_beta = drawn(1, 2, 2, 12).requires_grad_(True)
    capacity_loss(log_beta, 2, over=over).sum().backward()
    assert bool((log_beta.grad[..., :-1] > 0).all())
    assert not bool(log_beta.grad[..., -1].any())  # the newest token has no age yet
