"""Losses that train ForesightKV's scorer (arXiv 2602.03203), computed from its scores and log-probabilities."""

from __future__ import annotations

from kvbench.lazy import torch

MOST = 10.0  # log ratios are clamped to this size, so that no ratio overflows
PAIRS = 1 << 24  # pairs in memory at a time


def ranking_losses(scores: torch.Tensor, wanted: torch.Tensor, margin: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pairwise hinge loss of each set of scores against the oracle's ranking (supervised stage).

    scores, wanted: [r, n], r sets of n scores. The loss of a set is the mean of max(0, margin - (score_i - score_j))
    over all pairs with wanted_i > wanted_j. Returns two tensors [r]: the losses, 0 for a set without such a pair, and a
    bool that says whether the set has such a pair.
    """
    losses, slopes, counts = [], [], []
    size = max(1, PAIRS // max(1, scores.shape[1] ** 2))
    with torch.no_grad():
        for some, oracle in zip(scores.split(size), wanted.split(size)):
            ordered = oracle[:, :, None] > oracle[:, None]  # [r, n, n]
            short = (margin - (some[:, :, None] - some[:, None])).clamp_min(0).masked_fill(~ordered, 0.0)
            pairs = ordered.sum(dim=(1, 2))
            losses.append(short.sum(dim=(1, 2)) / pairs.clamp_min(1))
            # The gradient of a pair within the margin raises score i and lowers score j equally.
            falls = (short > 0).to(some.dtype)
            slopes.append((falls.sum(dim=1) - falls.sum(dim=2)) / pairs.clamp_min(1)[:, None])
            counts.append(pairs > 0)
    # The gradient is computed above, so autograd need not store the pairs.
    pull = ((scores - scores.detach()) * torch.cat(slopes)).sum(dim=-1)
    return torch.cat(losses) + pull, torch.cat(counts)


def ranking_loss(scores: torch.Tensor, wanted: torch.Tensor, margin: float) -> torch.Tensor:
    """Return the mean of `ranking_losses` over the sets with a pair wanted_i > wanted_j; 0 if no set has one."""
    losses, counts = ranking_losses(scores, wanted, margin)
    return losses.sum() / counts.sum().clamp_min(1)


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Return the normalised rewards [G] of a group of samples: minus their mean, then divided by their standard
    deviation."""
    return (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-8)


def chosen_log_probs(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return log softmax(scores) at the entries that `chosen` marks. scores: [..., n]; chosen: [..., n] bool.

    This is GRPO's policy over evictions: `scores` are the drop scores of all competing entries, `chosen` the dropped
    entries. As in the released code, it is not the exact probability of a draw without replacement.
    """
    return scores.log_softmax(dim=-1)[chosen]


def policy_loss(
    log_probs: torch.Tensor,
    before: torch.Tensor,
    reference: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip: float = 0.2,
    kl_weight: float = 0.01,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return GRPO's loss over evictions (reinforcement stage), and its divergence term without the weight.

        loss = mean of -min(r A, clip(r, 1 - clip, 1 + clip) A) + kl_weight * divergence
        r = exp(log_probs - before)
        divergence = mean of exp(d) - d - 1,  d = reference - log_probs

    A stands for `advantages`. log_probs, before, reference: log-probabilities of the same choices under the policy in
    training, the policy that made the choices, and the frozen reference policy. All tensors have the same shape.
    """
    ratio = (log_probs - before).clamp(-MOST, MOST).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    gap = reference - log_probs
    divergence = (gap.exp() - gap - 1).mean()
    return kl_weight * divergence - gain.mean(), divergence
