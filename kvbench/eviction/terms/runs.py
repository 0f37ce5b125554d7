"""Chunks of neighbouring tokens that stay or leave together: their ranks by mean score, and how many fit a budget.

The position of an entry decides its chunk: chunk i holds the positions from i * length to (i + 1) * length - 1.
"""

from __future__ import annotations

from kvbench.eviction.select import order_key
from kvbench.lazy import torch

LAST = (1 << 63) - 1  # rank of invalid entries


def run_ranks(
    score: torch.Tensor, positions: torch.Tensor, valid: torch.Tensor, must: torch.Tensor, length: int, longest: int
) -> torch.Tensor:
    """Return for each entry the rank of its chunk, [b, Hk, N] int64: 0 for the best chunk, the same in all heads.

    A chunk's score is the mean over its entries in all heads, without the entries that the mask `must` marks. Chunks
    with a marked entry come before all others. Of chunks with equal scores the newer is better. Invalid entries get
    LAST. length: tokens of a chunk; longest: a number above all positions.
    """
    run = (torch.where(valid, positions, 0) // length).flatten(1)  # a place without an entry has any position

    def sums(x: torch.Tensor) -> torch.Tensor:  # double, so that the order of storage does not change float32 results
        empty = torch.zeros(len(x), longest // length + 1, dtype=torch.float64, device=x.device)
        return empty.scatter_add_(1, run, x.double().flatten(1))

    free = valid & ~must
    mean = sums(torch.where(free, score, 0.0)) / sums(free)
    best = float("inf")
    mean = mean.nan_to_num(-best, best, -best).masked_fill_(sums(must & valid) > 0, best)
    number = torch.arange(mean.shape[1], device=mean.device).expand_as(mean)
    rank = order_key(mean.float(), number).argsort(dim=-1, descending=True).argsort(dim=-1)
    return rank.gather(-1, run).view_as(positions).masked_fill(~valid, LAST)


def by_run(score: torch.Tensor, positions: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
    """Return the indices [b, Hk, N] of each head's entries, ordered by the rank of their chunk, then by score."""
    order = order_key(score, positions).argsort(dim=-1, descending=True)
    return order.gather(-1, rank.gather(-1, order).argsort(dim=-1, stable=True))


def in_whole_runs(rank: torch.Tensor, budget: int) -> torch.Tensor:
    """Return how many entries each head keeps, [b, Hk], if it keeps as many of its best chunks as fit into `budget`.

    0 if not even the best chunk fits. rank: the rank of each entry's chunk, [b, Hk, N], in ascending order.
    """
    count = torch.arange(1, rank.shape[-1] + 1, device=rank.device)
    ends = torch.cat([rank.diff(dim=-1) > 0, torch.ones_like(rank[..., :1], dtype=torch.bool)], dim=-1)
    return torch.where(ends & (rank < LAST) & (count <= budget), count, 0).amax(dim=-1)
