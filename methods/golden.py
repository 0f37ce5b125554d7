"""golden: keep the entries that later queries attend to. It reads the future, so only `kvbench replay` runs it.

Paper: golden eviction of ForesightKV, arXiv 2602.03203.

The score of an entry j is the largest attention that a later query pays to it, averaged over the query heads of its
group. A^h_ij is the attention of query i in head h to entry j, with the full cache over the finished sequence
(`kvbench.eviction.terms.golden`):

    within=max     score_j = max over later i of mean over h of A^h_ij
    within=mean    score_j = max over blocks t' >= t of mean over i in block t', h of A^h_ij

A block is the tokens between two evictions; block t follows the eviction that uses the scores. `within=mean` is the
paper's score. The mean over a long block hides an entry that a single query needs. With `within=mean`, methods that do
not know the future can therefore do better than golden (docs/replay.md has the figures). A yardstick must not depend on
the interval, so the default is `max`.

The oracle also knows the future of the newest entries, so here all entries compete; with `recent` above 0, that many of
the newest always stay. In the paper the newest L entries, the tokens since the last eviction, always stay, and only the
C older ones compete (C: the budget). With L of at least C, the paper's rule would leave no choice.

golden is greedy and considers attention only, head by head: a strong yardstick, but not an optimum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvbench.errors import UserError
from kvbench.eviction.api import Method, Protect, option
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("golden", aliases=("oracle",))
@dataclass(frozen=True)
class Golden(Method):
    paper = "ForesightKV, arXiv 2602.03203"
    kind = "oracle"
    oracle = True

    within: Literal["mean", "max"] = option(
        "max",
        "how the attention of later queries to an entry becomes its score. max: the largest; mean (paper): the largest "
        "mean over a block of queries, those between two evictions",
    )
    recent: int = option(0, "newest tokens that always stay", low=0)

    def protect(self, budget: int) -> Protect:
        return Protect(recent=self.recent)

    def score(self, view: LayerView) -> torch.Tensor:
        """Return the scores, read from the tables [b, Hk, blocks + 1, T] of future attention in `view.weights`. Raises
        UserError if there are no such tables, which only `kvbench replay` makes."""
        future = view.weights.get(f"{self.within}.{view.layer}")
        if future is None:
            raise UserError("method 'golden' is an oracle: it needs future attention, which only 'kvbench replay' has.")
        block = (view.seen - view.prompt_len) // view.weights["interval"]
        coming = future[torch.arange(len(block), device=block.device), :, block]  # [b, Hk, T]
        return coming.gather(-1, view.positions)
