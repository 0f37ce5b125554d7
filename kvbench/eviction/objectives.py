"""What ForesightKV's scorer (arXiv 2602.03203) is trained to lessen, as functions of scores and log-probabilities."""

from __future__ import annotations

from kvbench.lazy import torch

MARGIN = 0.01
MOST = 10.0  # log ratios beyond this are cut, so that no ratio overflows


def ranking_loss(scores: torch.Tensor, wanted: torch.Tensor, margin: float = MARGIN) -> torch.Tensor:
    """Pairwise hinge: how far scores are from ranking entries as the oracle does (supervised stage).

    The mean over all ordered pairs with wanted_i > wanted_j of max(0, margin - (score_i - score_j)), and over rows;
    rows without such a pair do not count. scores, wanted: [rows, n]. A scalar, 0 where no row counts.
    """
    losses = []
    for row, oracle in zip(scores, wanted):  # one at a time: n x n pairs
        ordered = oracle[:, None] > oracle
        if bool(ordered.any()):
            losses.append((margin - (row[:, None] - row)).clamp_min(0)[ordered].mean())
    return torch.stack(losses).mean() if losses else scores.sum() * 0.0


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
