"""h2o: keep the heavy hitters, the tokens with the largest attention summed over all queries so far, and recent tokens.

Paper: Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference, arXiv 2306.14048.

Score: acc_j = sum over all queries i >= j of the group's mean of softmax_j(q_i k_j / sqrt(d)), the prompt's included.
The sum is a column: it stays with its entry, never decays, and is not divided by the number of queries.
Default: half of the budget is for recent tokens, as in the paper.

The released code evicts at every step and knows one KV head per query head only; kvbench takes the group's mean.
Between two evictions the cache only grows, so adding up at the next eviction gives the same sums. Other "H2O"s differ:
the R-KV repository's scores the last query only, KVCache-Factory's adds nothing while decoding, and G-KV's is
`gkv form=sum window=1 redundancy=false`.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.eviction.api import Column, Method, Needs, Protect, option
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("h2o")
@dataclass(frozen=True)
class H2O(Method):
    paper = "Zhang et al., arXiv 2306.14048"

    recent: float = option(0.5, "recent tokens: below 1 a share of the budget, otherwise a number of tokens", low=0)

    def needs(self) -> Needs:
        return Needs(queries="since_last")

    def columns(self) -> tuple[Column, ...]:
        return (Column(name="acc"),)

    def protect(self, budget: int) -> Protect:
        return Protect(recent=int(self.recent * budget) if self.recent < 1 else int(self.recent))

    def observe(self, view: LayerView) -> dict[str, torch.Tensor]:
        return {"acc": view.columns["acc"] + view.attend(reduce_g="mean", reduce_q="sum")}

    def score(self, view: LayerView) -> torch.Tensor:
        return view.columns["acc"]
