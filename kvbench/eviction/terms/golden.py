"""Golden eviction: what would have been dropped with the attention of the future known (ForesightKV, arXiv 2602.03203).

The oracle reads a finished sequence. Its attention is that of the full cache, softmax over all earlier tokens, never
renormalised after an eviction. Block t holds the L queries from `first` + t L on, the first token after the cache was
full once:

    a[h, t, j] = mean over the g query heads of KV head h, and over the L queries of block t, of A_ij

(a last block with fewer queries is divided by L all the same). At eviction t the cache holds what survived and the
newest L tokens; of the oldest C entries the L with the smallest

    alpha_j = max over t' >= t of a[h, t', j]

are dropped. The scores -alpha are what ForesightKV's supervised stage ranks by.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.eviction.select import order_key
from kvbench.lazy import torch

SCRATCH_FLOATS = 1 << 25  # logits at a time


@dataclass(frozen=True, slots=True)
class GoldenTrace:
    """The evictions of one layer of one sequence: s evictions, Hk KV heads, C entries that compete, L dropped."""

    candidates: torch.Tensor  # [s, Hk, C] int64 positions, ascending
    scores: torch.Tensor  # [s, Hk, C] float32, -alpha: large ones are dropped
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
    """Attention that blocks of coming queries pay to every token: a of the module's text, [Hk, blocks, T] float32.

    Args:
        queries: [Hq, T, d] post-RoPE of the whole sequence; keys: [Hk, T, d].
        interval: L; first: query with which block 0 begins.

    Memory is the result's and `SCRATCH_FLOATS`: T x T weights never exist at once.
    """
    heads, total, _ = keys.shape
    group = queries.shape[0] // heads
    starts = range(first, total, interval)
    found = torch.zeros(heads, len(starts), total, device=keys.device)
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
                found[head, block, :stop] += weights.sum(dim=(0, 1))
    return found / (group * interval)


def upcoming(attention: torch.Tensor) -> torch.Tensor:
    """alpha at every eviction, [Hk, blocks, T]: the most that any block from there on pays. Of `block_attention`."""
    return attention.flip(1).cummax(dim=1).values.flip(1)


def golden_evictions(attention: torch.Tensor, budget: int, interval: int) -> GoldenTrace:
    """What the oracle drops from a cache of `budget` + `interval` entries at every block.

    attention: of `block_attention`. It ends when the sequence has no more tokens than that. Equal alphas: the older
    entry goes.
    """
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
