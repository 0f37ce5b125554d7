"""chunkkv: keep or evict chunks of neighbouring tokens by their mean score, the same chunks in all heads of a layer.

Paper: Liu et al., ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference,
arXiv 2502.00299.

The option `base` names another method: its name, or its name with options as tables print it. The base gives the
scores, the protected tokens and the time of eviction. With c = `chunk`, the tokens at the positions from i c to
(i + 1) c - 1 form a chunk. The score of a chunk is the mean of the base's scores over the chunk's entries in all heads
of the layer, without the entries that the base protects. In the mean, the score inf, with which a base keeps an entry,
counts as the layer's largest finite score. Chunks with a protected entry come before all others. The best chunks stay.

If the budget ends inside a chunk, each head keeps the entries of this chunk with the base's best scores; with a single
chunk, the base decides alone. `whole=true` drops the chunk in which the budget ends, so fewer entries than the budget
may stay. Even then a part of a chunk stays if the best chunk alone exceeds the budget, or if the chunks that fit do not
hold all protected entries. Defaults: chunks of 20 tokens and snapkv as in kvpress; the paper has chunks of 10.

Traps of kvpress: it keeps a number of chunks and counts the short last chunk as a full one, so the number of tokens
that stay is not exactly the budget. It sums raw scores over heads, so heads with large scores decide; this file does
too. In the paper the next layers reuse a layer's choice; kvpress and this file do not.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.errors import quote
from kvbench.eviction import returned
from kvbench.eviction.api import Allocation, ScoreOut, option
from kvbench.eviction.delegate import Wrapper, delegate, named
from kvbench.eviction.options import OptionError
from kvbench.eviction.select import competing, order_key
from kvbench.eviction.terms.rkv_slot_order import RANK
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods

LAST = (1 << 63) - 1  # rank of invalid entries


@methods.register("chunkkv")
@dataclass(frozen=True)
class ChunkKV(Wrapper):
    paper = "Liu et al., arXiv 2502.00299"
    version = "2"  # 2: an infinite score does not decide for its chunk; `base` scores under the same protection

    base: str = option("snapkv", "the method that scores, with its options in brackets")
    chunk: int = option(20, "tokens in a chunk", low=1)
    whole: bool = option(False, "drop all of the chunk in which the budget ends; false: keep its best entries")

    def __post_init__(self) -> None:
        super().__post_init__()
        inner = named("base", self.base, lambda: self.inner)
        if not inner.takes_budget or not inner.uniform or inner.joint:
            raise OptionError(
                "base",
                "must name a method that takes a budget, scores each layer by itself and gives all heads equal "
                f"budgets; got {quote(self.base)}.",
            )
        if isinstance(inner, ChunkKV) or RANK in inner.columns():
            wanted = "must name a method that gives every entry a score of its own"
            raise OptionError("base", f"{wanted}; got {quote(self.base)}.")

    @property
    def uniform(self) -> bool:
        return not self.whole

    def score(self, view: LayerView) -> ScoreOut:
        out = returned.scored(self.inner, "score", self.inner.score(view), view)
        score = torch.where(view.valid, out.score.float(), float("-inf"))
        must = view.valid & ~competing(self, view)
        rank = run_ranks(score, view.positions, view.valid, must, self.chunk, view.longest)
        order = by_run(score, view.positions, rank)
        place = torch.arange(order.shape[-1], device=order.device).expand_as(order)
        whole = in_whole_runs(rank.gather(-1, order), view.budget)
        sizes = torch.where(whole > 0, whole, view.held().clamp(max=view.budget)).maximum(must.sum(dim=-1))
        return ScoreOut(torch.empty_like(score).scatter_(-1, order, -place.float()), out.columns, {"sizes": sizes})

    def quotas(self, allocation: Allocation) -> torch.Tensor | None:
        return allocation.stats["sizes"] if self.whole else None


def run_ranks(
    score: torch.Tensor, positions: torch.Tensor, valid: torch.Tensor, must: torch.Tensor, length: int, longest: int
) -> torch.Tensor:
    """Return for each entry the rank of its chunk, [b, Hk, N] int64: 0 for the best chunk, the same in all heads.

    A chunk's score is the mean score of its entries in all heads, without the entries that the mask `must` marks. In
    this mean, the score inf counts as the layer's largest finite score of unmarked entries. Chunks with a marked entry
    come before all others. Of chunks with equal scores the newer is better. Invalid entries get LAST. length: tokens of
    a chunk; longest: a number above all positions.
    """
    run = (torch.where(valid, positions, 0) // length).flatten(1)  # a place without an entry has any position

    def sums(x: torch.Tensor) -> torch.Tensor:  # double, so that the order of storage does not change float32 results
        empty = torch.zeros(len(x), longest // length + 1, dtype=torch.float64, device=x.device)
        return empty.scatter_add_(1, run, x.double().flatten(1))

    free, best = valid & ~must, float("inf")
    largest = torch.where(free & (score < best), score, -best).amax(dim=(1, 2), keepdim=True)
    mean = sums(torch.where(free, score.minimum(largest), 0.0)) / sums(free)
    mean = mean.nan_to_num(-best, best, -best).masked_fill_(sums(must & valid) > 0, best)
    number = torch.arange(mean.shape[1], device=mean.device).expand_as(mean)
    rank = order_key(mean.float(), number).argsort(dim=-1, descending=True).argsort(dim=-1)
    return rank.gather(-1, run).view_as(positions).masked_fill(~valid, LAST)


def by_run(score: torch.Tensor, positions: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
    """Return the indices [b, Hk, N] of each head's entries, ordered by the rank of their chunk, then by score."""
    order = order_key(score, positions).argsort(dim=-1, descending=True)
    return order.gather(-1, rank.gather(-1, order).argsort(dim=-1, stable=True))


def in_whole_runs(rank: torch.Tensor, budget: int) -> torch.Tensor:
    """Return how many entries each head keeps, [b, Hk], if it keeps as many of its best chunks as fit into `budget`. 0
    if not even the best chunk fits. rank: the rank of each entry's chunk, [b, Hk, N], in ascending order."""
    count = torch.arange(1, rank.shape[-1] + 1, device=rank.device)
    ends = torch.cat([rank.diff(dim=-1) > 0, torch.ones_like(rank[..., :1], dtype=torch.bool)], dim=-1)
    return torch.where(ends & (rank < LAST) & (count <= budget), count, 0).amax(dim=-1)


delegate(ChunkKV)  # all else is as `base` declares it
