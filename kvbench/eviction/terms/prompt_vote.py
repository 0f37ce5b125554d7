"""SnapKV's score, the base of several methods: the prompt's last queries vote for its entries (arXiv 2404.14469)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvbench.eviction.api import Method, Needs, Once, Protect, ScoreOut, Trigger, option
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch


@dataclass(frozen=True)
class PromptVote(Method):
    """A method that evicts once, after the prompt, by SnapKV's score. Subclasses may define `quotas`."""

    window: int = option(32, "last tokens of the prompt: their queries vote, and they always stay", low=1)
    kernel: int = option(7, "pooling width, 1 for none", low=1, odd=True)
    pool: Literal["max", "avg"] = option("max", "how votes are smoothed along the text")
    reduce_g: Literal["mean", "max"] = option("mean", "how the query heads of a group become one score")
    heads: Literal["kv", "query"] = option("kv", "which heads have separate caches: KV heads, or every query head")

    @property
    def per_query_head(self) -> bool:
        return self.heads == "query"

    def needs(self) -> Needs:
        return Needs(queries="window", window=self.window, keys=False)

    def protect(self, budget: int) -> Protect:
        return Protect(recent=self.window)

    def summed(self, view: LayerView) -> int:
        return self.window

    def trigger(self, interval: int) -> Trigger:
        return Once()

    def score(self, view: LayerView) -> torch.Tensor | ScoreOut:
        votes = view.attend(domain="all", order="softmax_then_group", reduce_g=None, reduce_q="sum")  # [b, Hk, g, N]
        votes = votes.mean(dim=2) if self.reduce_g == "mean" else votes.amax(dim=2)
        return view.pool(votes, self.pool, self.kernel, view.older(self.window))
