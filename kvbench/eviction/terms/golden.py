"""Golden eviction: the choices of an oracle that knows all later attention (ForesightKV, arXiv 2602.03203).

The oracle uses A_ij, the attention of query i to entry j over a finished sequence with the full cache. The softmax runs
over the query's own token and all earlier tokens; evictions do not change A. C is the budget, L the interval. Eviction
t = 0, 1, ... comes just before the model reads the L tokens of block t, which begins at position `first` + t L.
Eviction 0 comes when the cache first holds C + L entries. The attention of a block is

    a[h, t, j] = mean of A_ij over the g query heads of KV head h and over the L queries of block t

(a shorter last block is divided by L too). At eviction t the cache holds the newest L tokens and C older entries. Of
these C entries, the oracle drops the L with the smallest

    alpha_j = max over t' >= t of a[h, t', j].

ForesightKV's scorer predicts phi, which is large for entries to be dropped; so the supervised stage trains it to rank
entries by -alpha.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.eviction.select import order_key
from kvbench.lazy import torch

SCRATCH_FLOATS = 1 << 25  # logits at a time


@dataclass(frozen=True, slots=True)
class GoldenTrace:
    """The oracle's evictions in one layer of one sequence.

    At an eviction a head holds C + L entries (C: the budget, L: the interval). The newest L stay. The C older ones
    compete, and L of them are dropped. s: number of evictions. Hk: KV heads.
    """

    candidates: torch.Tensor  # [s, Hk, C] int64 positions, ascending
    scores: torch.Tensor  # [s, Hk, C] float32, -alpha: the largest are dropped
    dropped: torch.Tensor  # [s, Hk, L] int64 positions, ascending


def block_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    interval: int,
    first: int,
    *,
    scaling: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Return the attention of each block of later queries to every token, [Hk, blocks, T] float32. This is `a` in the
    module's docstring.

    queries: [Hq, T, d] post-RoPE of the whole sequence; keys: [Hk, T, d]; interval: L; first: position of block 0's
    first query. Memory: the result and `SCRATCH_FLOATS` numbers; the T x T weights never exist at once.
    """
    heads, total, _ = keys.shape
    group = queries.shape[0] // heads
    starts = range(first, total, interval)
    paid = torch.zeros(heads, len(starts), total, device=keys.device)
    for head in range(heads):
        own = keys[head].float()
        stacked = queries[head * group : (head + 1) * group].float() * scaling  # [g, T, d]
        for block, start in enumerate(starts):
            end = min(start + interval, total)
            rows = max(1, SCRATCH_FLOATS // (group * end))
            for begin in range(start, end, rows):
                stop = min(begin + rows, end)
                logits = stacked[:, begin:stop] @ own[:stop].T  # [g, rows, stop]
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                at = torch.arange(stop, device=keys.device)
                weights = logits.masked_fill(at > at[begin:, None], float("-inf")).softmax(dim=-1)
                paid[head, block, :stop] += weights.sum(dim=(0, 1))
    return paid / (group * interval)


def upcoming(attention: torch.Tensor) -> torch.Tensor:
    """Return alpha at every eviction, [Hk, blocks, T]: the maximum of `block_attention` over the block that follows
    the eviction and all later blocks."""
    return attention.flip(1).cummax(dim=1).values.flip(1)


def golden_evictions(attention: torch.Tensor, budget: int, interval: int) -> GoldenTrace:
    """Return the oracle's evictions, one per block, each from a cache of `budget` + `interval` entries. attention: from
    `block_attention`. Of entries with equal future attention, the oracle drops the older one."""
    heads, blocks, total = attention.shape
    alpha = upcoming(attention)
    alive = torch.arange(total, device=attention.device).expand(heads, -1)
    candidates, scores, dropped = [], [], []
    for block in range(blocks):
        if alive.shape[1] <= budget + interval:
            break
        oldest = alive[:, :budget]
        worth = alpha[:, block].gather(-1, oldest)
        gone = order_key(worth, oldest).topk(interval, dim=-1, largest=False).indices.sort(dim=-1).values
        candidates.append(oldest)
        scores.append(-worth)
        dropped.append(oldest.gather(-1, gone))
        stays = torch.ones_like(alive, dtype=torch.bool).scatter_(-1, gone, False)
        alive = alive[stays].view(heads, -1)
    empty = alive.new_zeros(0, heads, budget)
    return GoldenTrace(
        candidates=torch.stack(candidates) if candidates else empty,
        scores=torch.stack(scores) if scores else empty.float(),
        dropped=torch.stack(dropped) if dropped else empty[..., :interval],
    )
