"""random: keep the newest tokens and a random choice of the others; the baseline that every other method must beat.

The score is a hash of sample, eviction, layer, head and position, so results do not depend on the batch.
Default: the newest 16 stay. Without them a model loses its current sentence, and the baseline would measure that loss.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.eviction.api import Method, Protect, option
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("random")
@dataclass(frozen=True)
class Random(Method):
    kind = "noise"
    stacked = True

    recent: int = option(16, "newest tokens that always stay", low=0)

    def protect(self, budget: int) -> Protect:
        return Protect(recent=self.recent)

    def score(self, view: LayerView) -> torch.Tensor:
        return view.noise()
