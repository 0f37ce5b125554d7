"""Ranks of entries by score, with the tie rule of all decisions: of equal scores the newer entry is better."""

from __future__ import annotations

from kvbench.eviction.select import order_key
from kvbench.lazy import torch


def ranks(score: torch.Tensor, positions: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """Return each entry's rank by score within its head, [b, Hk, N] int64: 0 for the largest score. Entries that are
    not in the mask `among` come last, in no particular order; their scores may be NaN."""
    key = order_key(torch.where(among, score, 0.0), positions).masked_fill(~among, torch.iinfo(torch.int64).min)
    return key.argsort(dim=-1, descending=True).argsort(dim=-1)


def count_before(score: torch.Tensor, rank: torch.Tensor, share: torch.Tensor | float) -> torch.Tensor:
    """Return how many best entries of each head together score less than `share` of the head's total, [b, Hk] int64.

    From the best entry on, a head's scores are added up until their sum reaches `share` of the head's total. The entry
    that completes this sum is not counted. The count is 0 if no sum is large enough, as for a share above 1. score:
    [b, Hk, N], at least 0; rank: from `ranks`.
    """
    best = torch.empty_like(score, dtype=torch.float64).scatter_(-1, rank, score.double()).cumsum(dim=-1)
    reached = best >= share * best[..., -1:]
    return torch.where(reached.any(dim=-1), reached.int().argmax(dim=-1), 0)
