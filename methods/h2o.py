"""h2o: keep the heavy hitters, the tokens with the largest attention summed over all queries so far, and recent tokens.

Paper: Zhang et al., H2O: Heavy-Hitter Oracle for Efficient Generative Inference, arXiv 2306.14048.

Score: acc_j = sum over all queries i >= j, prompt included, of the group's mean of softmax_j(q_i k_j / sqrt(d)).
The sum is a column: it stays with its entry, never decays, and is not divided by the number of queries. No entry leaves
the cache between two evictions. So the sums that decode steps collect equal those computed at the next eviction from
stored queries, within rounding.
Default: half of the budget is for recent tokens, as in the paper.

The released code evicts at every step and needs one KV head per query head; kvbench takes the group's mean.
`reduce_g=max` keeps a sum per query head and takes their maximum, as an option of KVCache-Factory does; `group` must
then state the number of query heads per KV head.

Other repositories call different methods "H2O":

- In R-KV it scores by the last query only.
- In KVCache-Factory it adds nothing to the sums while decoding.
- In G-KV it is `gkv form=sum window=1 redundancy=false`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvbench.eviction.api import Column, Method, Needs, Protect, option
from kvbench.eviction.options import OptionError
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("h2o")
@dataclass(frozen=True)
class H2O(Method):
    paper = "Zhang et al., arXiv 2306.14048"
    stacked = True

    recent: float = option(0.5, "newest tokens that always stay; below 1: a share of the budget", low=0)
    reduce_g: Literal["mean", "max"] = option("mean", "how the query heads of a group become one score")
    group: int = option(1, "query heads per KV head; needed with reduce_g=max only", low=1)

    def needs(self) -> Needs:
        return Needs(queries="since_last", sums=True, keys=False)

    def columns(self) -> tuple[Column, ...]:
        return tuple(Column(name=name) for name in self._names)

    def protect(self, budget: int) -> Protect:
        return Protect(recent=int(self.recent * budget) if self.recent < 1 else int(self.recent))

    def observe(self, view: LayerView) -> dict[str, torch.Tensor]:
        if self.reduce_g == "mean":
            return {"acc": view.columns["acc"] + view.attend(reduce_g="mean", reduce_q="sum")}
        sums = view.attend(reduce_g=None, reduce_q="sum")  # [b, Hk, g, N]
        if sums.shape[2] != self.group:
            raise OptionError("group", f"must be {sums.shape[2]} for this model with reduce_g=max; got {self.group}.")
        return {name: view.columns[name] + sums[:, :, head] for head, name in enumerate(self._names)}

    def score(self, view: LayerView) -> torch.Tensor:
        if self.reduce_g == "mean":
            return view.columns["acc"]
        return torch.stack([view.columns[name] for name in self._names]).amax(dim=0)

    @property
    def _names(self) -> tuple[str, ...]:
        return ("acc",) if self.reduce_g == "mean" else tuple(f"acc{head}" for head in range(self.group))
