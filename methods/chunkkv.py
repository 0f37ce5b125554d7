"""chunkkv: keep or evict chunks of neighbouring tokens by their mean score, the same chunks in all heads of a layer.

Paper: Liu et al., ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference,
arXiv 2502.00299.

The option `base` names another method: its name, or its name with options as tables print it. The base gives the
scores, the protected tokens and the time of eviction. With c = `chunk`, the tokens at the positions from i c to
(i + 1) c - 1 form a chunk. The score of a chunk is the mean of the base's scores over the chunk's entries in all heads
of the layer, without the entries that the base protects. Chunks with a protected entry come before all others. The best
chunks stay.

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
from functools import cached_property

from kvbench.errors import quote
from kvbench.eviction.api import Allocation, Method, ScoreOut, option
from kvbench.eviction.choose import from_label
from kvbench.eviction.delegate import DECLARATIONS, PROPERTIES, delegate, named
from kvbench.eviction.options import OptionError
from kvbench.eviction.select import kept_always, protected
from kvbench.eviction.terms.rkv_slot_order import RANK
from kvbench.eviction.terms.runs import by_run, in_whole_runs, run_ranks
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("chunkkv")
@dataclass(frozen=True)
class ChunkKV(Method):
    paper = "Liu et al., arXiv 2502.00299"

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
            raise OptionError("base", f"must name a method that scores single entries; got {quote(self.base)}.")

    @cached_property
    def inner(self) -> Method:
        """Return the method that the option `base` names; it computes the scores."""
        return from_label(self.base)

    @property
    def uniform(self) -> bool:
        return not self.whole

    def score(self, view: LayerView) -> ScoreOut:
        out = self.inner.score(view)
        out = out if isinstance(out, ScoreOut) else ScoreOut(out)
        score = torch.where(view.valid, out.score.float(), float("-inf"))
        must = protected(kept_always(self, view), view.positions, view.seen, view.prompt_len, view.valid)
        must = torch.zeros_like(view.valid) if must is None else must
        rank = run_ranks(score, view.positions, view.valid, must, self.chunk, view.longest)
        order = by_run(score, view.positions, rank)
        place = torch.arange(order.shape[-1], device=order.device).expand_as(order)
        whole = in_whole_runs(rank.gather(-1, order), view.budget)
        sizes = torch.where(whole > 0, whole, view.held().clamp(max=view.budget)).maximum(must.sum(dim=-1))
        return ScoreOut(torch.empty_like(score).scatter_(-1, order, -place.float()), out.columns, {"sizes": sizes})

    def quotas(self, allocation: Allocation) -> torch.Tensor | None:
        return allocation.stats["sizes"] if self.whole else None


delegate(ChunkKV, DECLARATIONS, PROPERTIES)  # all else is as `base` declares it
