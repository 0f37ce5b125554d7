"""knorm: keep keys of small norm, which tend to receive attention.

Paper: Devoto et al., A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression, arXiv 2406.11430.

Score: -||k_j||_2. The paper protects no entries; `recent` protects the newest tokens.
KVCache-Factory does not evict in the first two layers; kvpress and kvbench do.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.eviction.api import Method, Protect, option
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("knorm")
@dataclass(frozen=True)
class KNorm(Method):
    paper = "Devoto et al., arXiv 2406.11430"
    kind = "keys"
    stacked = True

    recent: int = option(0, "newest tokens that always stay", low=0)

    def protect(self, budget: int) -> Protect:
        return Protect(recent=self.recent)

    def score(self, view: LayerView) -> torch.Tensor:
        return -view.keys.float().norm(dim=-1)
