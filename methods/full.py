"""full: the whole cache, without eviction.

All other methods are compared with it in quality, memory and time. A method that evicts can still score higher.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.eviction.api import Method, Never, Trigger
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("full")
@dataclass(frozen=True)
class Full(Method):
    kind = "none"
    evicts = False

    def trigger(self, interval: int) -> Trigger:
        return Never()

    def score(self, view: LayerView) -> torch.Tensor:
        return view.positions.float()
