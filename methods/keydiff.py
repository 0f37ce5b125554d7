"""keydiff: keep the keys that differ most from the rest, judged by direction alone.

Paper: Park et al., KeyDiff: Key Similarity-Based KV Cache Eviction, arXiv 2504.15364.

Score: -cos(k_j, mean_i k_i / |k_i|), the mean over the entries that the head holds. No attention is needed.
The paper compresses block by block while it reads the prompt; here, as in kvpress, an eviction sees the whole cache.
The released forms protect nothing (`recent=0`).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.eviction.api import Method, Protect, option
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("keydiff")
@dataclass(frozen=True)
class KeyDiff(Method):
    paper = "Park et al., arXiv 2504.15364"
    kind = "keys"

    recent: int = option(0, "newest tokens that always stay", low=0)

    def protect(self, budget: int) -> Protect:
        return Protect(recent=self.recent)

    def score(self, view: LayerView) -> torch.Tensor:
        keys = torch.where(view.valid[..., None], view.keys.float(), 0.0)
        units = torch.nn.functional.normalize(keys, dim=-1)
        # In float64 the order of the entries does not show in the sum. Its length drops out of a cosine.
        anchor = torch.nn.functional.normalize(units.sum(dim=2, dtype=torch.float64), dim=-1).float()
        return -(units * anchor[:, :, None]).sum(dim=-1)
