"""golden: keep the entries that later queries attend to. It knows the future, so only `kvbench replay` runs it.

Paper: golden eviction of ForesightKV, arXiv 2602.03203.

The score of an entry is the most that any coming query pays to it, on the mean over the query heads of its group, in
the attention of the full cache over the finished sequence:

    within=max     score_j = max over i to come of mean over h of A^h_ij
    within=mean    score_j = max over blocks t' >= t of mean over i in block t', h of A^h_ij

Blocks are the tokens between two evictions; their mean is the paper's score. Over a long block it hides an entry that
one query needs, so a method without an oracle can come out lower (docs/replay.md has the figures); a yardstick must not
be fooled by the length of the interval, hence the default. Attention is never renormalised after an eviction, and of
means that of a last block with fewer queries is divided by the length of a whole one (`kvbench.eviction.terms.golden`).

The paper lets the oldest C of C + L entries compete and keeps the newest L, the tokens since the last eviction. That
leaves nothing to choose where L is not below the budget, and the future of the newest entries is as well known as that
of all others; so they compete too, unless `recent` says how many stay.

It is greedy and looks at attention alone, head by head: a strong yardstick, not the best choice that could be made.
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
        "max", "what counts of a block's queries: the most one pays, or their mean (paper)"
    )
    recent: int = option(0, "newest tokens that always stay", low=0)

    def protect(self, budget: int) -> Protect:
        return Protect(recent=self.recent)

    def score(self, view: LayerView) -> torch.Tensor:
        """`view.weights` holds the future: `interval`, and per layer a table [b, Hk, blocks + 1, T]."""
        future = view.weights.get(f"{self.within}.{view.layer}")
        if future is None:
            raise UserError("method 'golden' is an oracle: it knows the future, which only 'kvbench replay' can tell.")
        block = (view.seen - view.prompt_len) // view.weights["interval"]
        coming = future[torch.arange(len(block), device=block.device), :, block]  # [b, Hk, T]
        return coming.gather(-1, view.positions)
