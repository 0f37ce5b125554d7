"""tova: evict the entries that the newest token attends to least, the same tokens in all heads of a layer.

Paper: Oren et al., Transformers are Multi-State RNNs, arXiv 2401.06104.

Score: mean over all query heads of softmax_j(q_T k_j / sqrt(d)), one score per token for the whole layer.
The paper evicts one entry per step and protects none; kvpress protects the newest (`recent=1`).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.eviction.api import Method, Needs, Protect, option
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("tova")
@dataclass(frozen=True)
class TOVA(Method):
    paper = "Oren et al., arXiv 2401.06104"
    stacked = True
    aligned = needs_aligned = True

    recent: int = option(0, "newest tokens that always stay", low=0)

    def needs(self) -> Needs:
        return Needs(queries="last", keys=False)

    def protect(self, budget: int) -> Protect:
        return Protect(recent=self.recent)

    def score(self, view: LayerView) -> torch.Tensor:
        attention = view.attend(reduce_g="mean", reduce_q="mean")
        # Heads hold the same tokens, perhaps in another order: align them before the mean.
        order = view.text_order()
        row = attention.gather(-1, order).mean(dim=1, keepdim=True)  # [b, 1, N]
        return torch.empty_like(attention).scatter_(-1, order, row.expand_as(attention).contiguous())
