"""Triggers say when an eviction happens; `TopK` picks the entries that stay."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.lazy import torch


@dataclass(frozen=True, slots=True)
class Every:
    """Evict right after the prompt and after every `interval` generated tokens, if the sequence then holds more entries
    than its budget.

    at_budget: call the method also when the sequence holds exactly its budget; the method then evicts nothing, but may
    update its columns.
    after: the number of generated tokens after which the first interval begins.
    """

    interval: int
    at_budget: bool = False
    after: int = 0

    @property
    def growth(self) -> int | None:
        """The most entries that a head gains between two evictions; None: unbounded."""
        return self.interval + self.after

    def due(self, clock: int) -> bool:
        """Return whether a sequence has a tick after `clock` generated tokens."""
        return clock > self.after and (clock - self.after) % self.interval == 0

    def full(self, held: float, budget: int) -> bool:
        """Return whether a sequence that holds `held` entries (a mean over its heads) must evict down to `budget`."""
        return held >= budget if self.at_budget else held > budget


@dataclass(frozen=True, slots=True)
class EveryTime(Every):
    """Evict at the times of `Every`, even if the mean over heads is within the budget: a head may exceed its quota."""

    def full(self, held: float, budget: int) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Once:
    """Evict once, right after the prompt; generated entries always stay."""

    @property
    def growth(self) -> int | None:
        return None

    def due(self, clock: int) -> bool:
        return False

    def full(self, held: float, budget: int) -> bool:
        return held > budget


@dataclass(frozen=True, slots=True)
class Never(Once):
    """No eviction at all (the full cache)."""

    def full(self, held: float, budget: int) -> bool:
        return False


Trigger = Every | Once


@dataclass(frozen=True, slots=True)
class TopK:
    """Selects the entries with the largest sort keys (score, then position: see `select.order_key`)."""

    def choose(self, keys: torch.Tensor, count: int | torch.Tensor, *, distinct: bool) -> torch.Tensor:
        """Return the mask of the `count` largest int64 sort keys along the last axis, [..., n] bool.

        count: one number for all rows, or a tensor [...] with one number per row of n keys. distinct: the caller knows
        that no two keys of a row are equal; if False, ties go to the later key.
        """
        n = keys.shape[-1]
        if isinstance(count, torch.Tensor):
            rank = keys.argsort(dim=-1, stable=True).argsort(dim=-1)
            return rank >= n - count[..., None]
        keep = torch.ones_like(keys, dtype=torch.bool)
        if (drop := n - min(count, n)) == 0:
            return keep
        if distinct:  # fewer entries are dropped than kept, usually, so a top-k of the dropped ones is cheaper
            evicted = keys.topk(drop, dim=-1, largest=False, sorted=False).indices
        else:  # top-k breaks ties arbitrarily, a stable sort by index
            evicted = keys.argsort(dim=-1, stable=True)[..., :drop]
        return keep.scatter_(-1, evicted, False)
