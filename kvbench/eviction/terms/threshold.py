"""Base of methods that keep either the best entries within a budget or, without a budget, all entries that reach
a threshold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvbench.eviction.api import EveryTime, Method, TopK, Trigger, option
from kvbench.eviction.select import order_key
from kvbench.lazy import torch


@dataclass(frozen=True, slots=True)
class AtLeast(TopK):
    """Selects the entries with a score of at least `score`, however many."""

    score: float

    def choose(self, keys: torch.Tensor, count: int | torch.Tensor, *, distinct: bool) -> torch.Tensor:
        least = torch.tensor([self.score], device=keys.device)
        return keys >= order_key(least, torch.zeros_like(least, dtype=torch.int64))


@dataclass(frozen=True)
class Thresholded(Method):
    """A method whose option `strategy` chooses between a budget and a threshold."""

    strategy: Literal["fixed_budget", "threshold"] = option(
        "fixed_budget", "keep the best entries within the budget, or all entries that reach the threshold"
    )

    @property
    def least(self) -> float:
        """The lowest score with which an entry stays under strategy=threshold."""
        raise TypeError(f"{type(self).__name__} must define `least`, the lowest score with which an entry stays")

    @property
    def takes_budget(self) -> bool:
        return self.strategy == "fixed_budget"

    decode_bounded = takes_budget

    def trigger(self, interval: int) -> Trigger:
        return super().trigger(interval) if self.takes_budget else EveryTime(interval)

    def allowed(self, budget: int | None, prompt_len: int, seen: int, evictions: int) -> int:
        return super().allowed(budget, prompt_len, seen, evictions) if self.takes_budget else seen

    def selector(self) -> TopK:
        return super().selector() if self.takes_budget else AtLeast(self.least)
