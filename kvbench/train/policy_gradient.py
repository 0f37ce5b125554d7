"""The gradient of `foresightkv-grpo`'s loss, added up one eviction at a time while a trace is read.

A trace is read G times. The advantage A_g of reading g is known only after its last token. Until then, the scorer's
inputs at all evictions of a long trace would take more memory than a GPU has. So no inputs are kept; instead, gradients
that need no advantage are computed at each eviction and added up. The sums take as much memory as G + 1 scorers.

The scorer is updated only once with the evictions that it draws. The ratio in the policy loss
(`kvbench.eviction.terms.objectives`) is therefore 1, and loss and gradient are linear in the advantages:

    gradient of the loss = sum over g of A_g * gradient of p_g, plus kl * gradient of the divergence

p_g is the policy loss of reading g at advantage 1. The divergence is that from the initial scorer; kl is its weight.

Letters: G readings of one trace, Hk KV heads, n competing entries, D inputs of the scorer per entry.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvbench.eviction.terms.foresight import drop_scores
from kvbench.eviction.terms.objectives import chosen_log_probs, policy_loss
from kvbench.train.foresight_states import Choice


class PolicyGradient:
    """Sums the gradients of the policy loss over the evictions of one trace's G readings.

    scorer: the scorer in training, which drew the evictions. reference: the initial scorer. group: G. clip: bound of
    the ratio in the policy loss.
    """

    def __init__(
        self, scorer: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor], group: int, clip: float
    ) -> None:
        self.scorer, self.reference, self.group, self.clip = scorer, reference, group, clip
        self._entries = 0  # evicted entries so far, in all readings
        # Three sums over evicted entries: the gradient of each reading's policy loss, [G, ...] per tensor of the
        # scorer; the gradient of the divergence; the divergence.
        self._policy = {name: t.new_zeros((group, *t.shape)) for name, t in scorer.items()}
        self._pull = {name: torch.zeros_like(t) for name, t in scorer.items()}
        self._divergence = scorer["b2"].new_zeros(())

    @torch.enable_grad()
    def add(self, choice: Choice) -> None:
        """Add the gradients of one eviction in one layer to the sums. Call this outside inference mode."""
        layer = choice.layer
        # Each reading has its own copy of the layer's tensors, so that each has its own gradient.
        own = {name: t[layer].detach().expand(self.group, *t.shape[1:]) for name, t in self.scorer.items()}
        leaves = [t.requires_grad_() for t in own.values()]
        now = chosen_log_probs(drop_scores({name: t[None] for name, t in own.items()}, 0, choice.x), choice.dropped)
        with torch.no_grad():
            before = chosen_log_probs(drop_scores(self.reference, layer, choice.x), choice.dropped)
        loss, divergence = policy_loss(now, now.detach(), before, torch.ones_like(now), clip=self.clip, kl_weight=0.0)
        policy = torch.autograd.grad(loss, leaves, retain_graph=True)
        pull = torch.autograd.grad(divergence, leaves)
        for name, mine, ours in zip(own, policy, pull):
            self._policy[name][:, layer] += mine * len(now)
            self._pull[name][layer] += ours.sum(dim=0) * len(now)
        self._divergence += divergence.detach() * len(now)
        self._entries += len(now)

    def loss(self, advantages: torch.Tensor, kl_weight: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of the G readings, which carries its gradient, and the divergence, a number without gradient.

        Both are means over layers, heads, evictions and evicted entries. The loss contains the divergence times
        `kl_weight`; the returned divergence is not multiplied by it. advantages: [G], one for each reading.
        """
        divergence = self._divergence / self._entries
        total = kl_weight * divergence - advantages.to(divergence).mean()
        for name, tensor in self.scorer.items():
            policy = torch.tensordot(advantages.to(tensor), self._policy[name], dims=1)
            slope = (policy + kl_weight * self._pull[name]) / self._entries
            total = total + ((tensor - tensor.detach()) * slope).sum()
        return total, divergence
