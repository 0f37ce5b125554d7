"""The gradient that is added up eviction by eviction is that of the whole policy loss."""

from __future__ import annotations

import pytest
import torch

from kvbench.eviction.terms import blocks
from kvbench.eviction.terms.foresight import drop_scores
from kvbench.eviction.terms.objectives import chosen_log_probs, policy_loss
from kvbench.train.foresight_states import Choice
from kvbench.train.policy_gradient import PolicyGradient

LAYERS, HEADS, INPUTS, HIDDEN, GROUP = 3, 2, 5, 4, 3


@pytest.fixture(autouse=True, params=[blocks.FLOATS, 1], ids=["at once", "row by row"])
def block(request, monkeypatch):
    """How much of the batch the network computes at a time on a CPU; long sequences do not fit into one block."""
    monkeypatch.setattr(blocks, "FLOATS", request.param)


def scorers():
    """The scorer in training, and an initial one not far from it."""
    shapes = {"w1": (INPUTS, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN,), "b2": ()}
    draws = torch.Generator().manual_seed(1)
    now, more = (
        {name: torch.randn(LAYERS, HEADS, *shape, generator=draws) for name, shape in shapes.items()} for _ in range(2)
    )
    before = {name: tensor + 0.1 * more[name] for name, tensor in now.items()}
    return {name: tensor.requires_grad_() for name, tensor in now.items()}, before


def evictions():
    """Evictions of layers 0 and 2: after the prompt 9 of 14 entries go, later 4 of 10."""
    draws, made = torch.Generator().manual_seed(7), []
    for seen, entries, count in ((20, 14, 9), (24, 10, 4), (28, 10, 4)):
        for layer in (0, 2):
            worth = torch.randn(GROUP, HEADS, entries, generator=draws)
            dropped = torch.zeros_like(worth, dtype=torch.bool)
            dropped.scatter_(-1, worth.topk(count, largest=False).indices, True)
            x = torch.randn(GROUP, HEADS, entries, INPUTS, generator=draws)
            made.append(Choice(layer=layer, seen=seen, x=x, worth=worth, dropped=dropped))
    return made


def in_one_graph(now, before, choices, worth, *, clip, kl):
    """The slow reference: the policy loss of all evictions at once."""
    chosen, reference, gains = [], [], []
    for choice in choices:
        chosen.append(chosen_log_probs(drop_scores(now, choice.layer, choice.x), choice.dropped))
        reference.append(chosen_log_probs(drop_scores(before, choice.layer, choice.x), choice.dropped))
        gains.append(worth.repeat_interleave(len(chosen[-1]) // len(worth)))
    log_probs = torch.cat(chosen)
    wanted = log_probs, log_probs.detach(), torch.cat(reference), torch.cat(gains)
    return policy_loss(*wanted, clip=clip, kl_weight=kl)


@pytest.mark.parametrize("kl", [0.0, 0.3])
@pytest.mark.parametrize("worth", [(1.2, -0.7, -0.5), (0.0, 0.0, 0.0), (2.0, 1.0, -1.0)], ids=str)
def test_the_sum_over_evictions_is_the_loss_in_one_graph(worth, kl):
    (now, before), worth = scorers(), torch.tensor(worth)
    loss, divergence = in_one_graph(now, before, evictions(), worth, clip=0.2, kl=kl)
    slopes = torch.autograd.grad(loss, list(now.values()))
    policy = PolicyGradient(now, before, GROUP, 0.2)
    for choice in evictions():
        policy.add(choice)
    found, gap = policy.loss(worth, kl)
    torch.testing.assert_close(found, loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gap, divergence, rtol=1e-5, atol=1e-5)
    for slope, wanted in zip(torch.autograd.grad(found, list(now.values())), slopes):
        torch.testing.assert_close(slope, wanted, rtol=1e-5, atol=1e-5)
    assert (max(float(slope.abs().max()) for slope in slopes) > 0.01) == bool(kl or worth.any())
