"""keydiff: keep the keys whose directions differ most from the mean direction.

Paper: Park et al., KeyDiff: Key Similarity-Based KV Cache Eviction, arXiv 2504.15364.

Score: -cos(k_j, mean_i k_i / |k_i|), the mean over the entries that the head holds. No attention is computed.
The paper evicts after each block of the prompt; here, as in kvpress, an eviction sees the whole cache.
The released forms protect no entries (`recent=0`).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.eviction.api import Method, Protect, option
from kvbench.eviction.terms.blocks import in_blocks
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("keydiff")
@dataclass(frozen=True)
class KeyDiff(Method):
    paper = "Park et al., arXiv 2504.15364"
    kind = "keys"
    stacked = True

    recent: int = option(0, "newest tokens that always stay", low=0)

    def protect(self, budget: int) -> Protect:
        return Protect(recent=self.recent)

    def score(self, view: LayerView) -> torch.Tensor:
        def of_rows(some: slice) -> torch.Tensor:
            return _difference(view.keys[some], None if view.mask is None else view.mask[some])

        return in_blocks(view.keys, view.keys.shape[1:].numel(), of_rows)


def _difference(keys: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
    """Return the scores [b, Hk, N] of keys [b, Hk, N, d]. valid: mask of valid entries; None: all entries are valid."""
    keys = keys.float() if valid is None else torch.where(valid[..., None], keys.float(), 0.0)
    units = torch.nn.functional.normalize(keys, dim=-1)
    # A float64 sum does not depend on the order of the entries. The sum replaces the mean: a cosine ignores length.
    anchor = torch.nn.functional.normalize(units.sum(dim=2, dtype=torch.float64), dim=-1).float()
    return -(units * anchor[:, :, None]).sum(dim=-1)
