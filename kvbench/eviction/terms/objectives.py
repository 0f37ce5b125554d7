"""What ForesightKV's scorer (arXiv 2602.03203) is trained to lessen, as functions of scores and log-probabilities."""

from __future__ import annotations

from kvbench.lazy import torch

MARGIN = 0.01
MOST = 10.0  # log ratios beyond this are cut, so that no ratio overflows
PAIRS = 1 << 24  # looked at together


def ranking_losses(
    scores: torch.Tensor, wanted: torch.Tensor, margin: float = MARGIN
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairwise hinge of every row: how far its scores are from ranking entries as the oracle does (supervised stage).

    The mean over all ordered pairs with wanted_i > wanted_j of max(0, margin - (score_i - score_j)). scores, wanted:
    [rows, n]. Returns [rows], 0 where a row has no such pair, and bool [rows] of those that have.
    """
    losses, slopes, counts = [], [], []
    size = max(1, PAIRS // max(1, scores.shape[1] ** 2))
    with torch.no_grad():
        for some, oracle in zip(scores.split(size), wanted.split(size)):
            ordered = oracle[:, :, None] > oracle[:, None]  # [r, n, n]
            short = (margin - (some[:, :, None] - some[:, None])).clamp_min(0).masked_fill(~ordered, 0.0)
            pairs = ordered.sum(dim=(1, 2))
            losses.append(short.sum(dim=(1, 2)) / pairs.clamp_min(1))
            # A pair that falls short pulls its first entry up and its second one down, one as much as the other.
            falls = (short > 0).to(some.dtype)
            slopes.append((falls.sum(dim=1) - falls.sum(dim=2)) / pairs.clamp_min(1)[:, None])
            counts.append(pairs > 0)
    # The gradient is known, so the pairs need not be kept for it.
    pull = ((scores - scores.detach()) * torch.cat(slopes)).sum(dim=-1)
    return torch.cat(losses) + pull, torch.cat(counts)


def ranking_loss(scores: torch.Tensor, wanted: torch.Tensor, margin: float = MARGIN) -> torch.Tensor:
    """The mean of `ranking_losses` over the rows that have an order; 0 where none has."""
    losses, counts = ranking_losses(scores, wanted, margin)
    return losses.sum() / counts.sum().clamp_min(1)


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """How much better each of a group's rewards is than their mean, in standard deviations of the group; [G]."""
    return (rewards - rewards.mean()) / (rewards.std(correction=0) + 1e-8)


def chosen_log_probs(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Logarithm of softmax(scores) [..., n] at the entries that bool [..., n] marks, one after the other: [marked].

    GRPO's policy over evictions: drop scores of all entries that compete, gathered at those that went. Not the exact
    probability of a draw without replacement among the worst, as in the released code.
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
    """GRPO's loss over evictions (reinforcement stage), and the mean divergence from the reference that is in it.

    mean of -min(r A, clip(r, 1 - clip, 1 + clip) A), r = exp(log_probs - before), plus kl_weight times the mean of
    exp(d) - d - 1, d = reference - log_probs. All tensors of one shape.
    """
    ratio = (log_probs - before).clamp(-MOST, MOST).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    gap = reference - log_probs
    divergence = (gap.exp() - gap - 1).mean()
    return kl_weight * divergence - gain.mean(), divergence
