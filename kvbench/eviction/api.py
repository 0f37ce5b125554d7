"""The interface of an eviction method: what it declares, and the one call it must answer.

A method is a frozen dataclass in one file under ``methods/``. Its fields are its options (``--method-opt
NAME=VALUE``), its docstring names paper, equation and defaults, and `score` maps a `LayerView` to one float32 score
per cached entry: **higher is kept**, whatever the paper used. The engine owns memory; a method never moves, counts or
pads entries.

    @methods.register("knorm")
    @dataclass(frozen=True)
    class KNorm(Method):
        def score(self, view: LayerView) -> torch.Tensor:
            return -view.keys.norm(dim=-1)

Shapes: b sequences, Hk KV heads, Hq query heads, g = Hq // Hk, N entries, w queries, d head dimension, T tokens seen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvbench.eviction.options import check_values
from kvbench.eviction.options import option as option  # method files take it from here
from kvbench.lazy import torch

if TYPE_CHECKING:
    from kvbench.eviction.view import LayerView


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What the engine must collect. Queries are post-RoPE.

    "last" and "window" keep the newest 1 and `window` queries; "since_last" hands every query to `Method.observe`
    exactly once: the prompt's in blocks while it is read, later ones at the next eviction.
    """

    queries: Literal["none", "last", "window", "since_last"] = "none"
    window: int = 0
    values: bool = False  # whether `score` or `observe` reads `view.values`


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A named float32 tensor [b, Hk, N] that the engine stores beside K and V, moves with them and counts in bytes."""

    name: str
    init: float = 0.0  # value of new entries; NaN marks "never scored"


@dataclass(frozen=True, slots=True, kw_only=True)
class Protect:
    """Entries that no score can evict: the first `sinks` tokens, the newest `recent`, the whole prompt."""

    sinks: int = 0
    recent: int = 0
    prompt: bool = False


@dataclass(frozen=True, slots=True)
class Every:
    """Evict after every `interval` generated tokens of a sequence if it then holds more than its budget.

    `at_budget` also calls the method when exactly the budget is held: nothing can go, but its columns may change.
    """

    interval: int
    at_budget: bool = False

    @property
    def growth(self) -> int | None:
        return self.interval

    def due(self, clock: int) -> bool:
        return clock % self.interval == 0

    def full(self, held: int, budget: int) -> bool:
        return held >= budget if self.at_budget else held > budget


@dataclass(frozen=True, slots=True)
class Never:
    """No eviction at all (the full cache)."""

    @property
    def growth(self) -> int | None:
        return None

    def due(self, clock: int) -> bool:
        return False

    def full(self, held: int, budget: int) -> bool:
        return False


Trigger = Every | Never


@dataclass(frozen=True, slots=True)
class TopK:
    """Keep the entries with the largest keys (score, then position: see `select.order_key`)."""

    def choose(self, keys: torch.Tensor, count: int | torch.Tensor, *, distinct: bool) -> torch.Tensor:
        """[..., n] bool with the `count` largest int64 keys of every row set.

        Args:
            count: one number for all rows, or int64 [...] with one for each.
            distinct: no two keys of a row are equal; otherwise the later of two equal ones is kept first.
        """
        n = keys.shape[-1]
        if isinstance(count, torch.Tensor):
            rank = keys.argsort(dim=-1, stable=True).argsort(dim=-1)
            return rank >= n - count[..., None]
        keep = torch.ones_like(keys, dtype=torch.bool)
        if (drop := n - min(count, n)) == 0:
            return keep
        # The dropped are fewer than the kept between two evictions, so selecting them is the cheaper top-k.
        # Top-k breaks ties as it likes, a stable sort by place.
        evicted = (
            keys.topk(drop, dim=-1, largest=False, sorted=False).indices
            if distinct
            else (keys.argsort(dim=-1, stable=True)[..., :drop])
        )
        return keep.scatter_(-1, evicted, False)


@dataclass(frozen=True, slots=True)
class ScoreOut:
    """Scores [b, Hk, N] float32 and, where a method carries state, new values of its columns."""

    score: torch.Tensor
    columns: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Method(ABC):
    """Base of all methods. Subclasses are frozen dataclasses; their fields are the options.

    Class attributes:
        paper: authors, title or arXiv id, and the equation implemented.
        scope: over what entries compete for the budget: one "head", one "layer" (its heads), or the whole "model".
        decode_bounded: False when generated entries are never evicted.
        evicts: False for the full cache, which takes no budget.
    """

    paper: ClassVar[str] = ""
    version: ClassVar[str] = "1"
    scope: ClassVar[Literal["head", "layer", "model"]] = "head"
    decode_bounded: ClassVar[bool] = True
    evicts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_values(self)

    @abstractmethod
    def score(self, view: LayerView) -> torch.Tensor | ScoreOut:
        """Score every entry of one layer, [b, Hk, N] float32; higher is kept."""

    def observe(self, view: LayerView) -> dict[str, torch.Tensor]:
        """New column values after a block of queries (`view.queries`); for `Needs(queries="since_last")` only."""
        raise TypeError(f"{type(self).__name__} needs all queries but does not define observe()")

    def needs(self) -> Needs:
        return Needs()

    def columns(self) -> tuple[Column, ...]:
        return ()

    def protect(self, budget: int) -> Protect:
        return Protect()

    def trigger(self, interval: int) -> Trigger:
        return Every(interval)

    def selector(self) -> TopK:
        return TopK()

    def quotas(self, stats: dict[str, Any], layers: int, kv_heads: int, budget: int) -> torch.Tensor | None:
        """Entries for each [layer, KV head], int64 with sum layers * kv_heads * budget, or None for a uniform budget.

        `stats` holds what the method's `score` calls of this eviction put aside per layer.
        """
        return None

    def min_budget(self) -> int:
        """Smallest budget that leaves at least one entry to the scores. Protected entries always count."""
        # A protection may itself depend on the budget (h2o keeps budget // 2), so look for the first budget that fits.
        budget = 1
        while (p := self.protect(budget)).sinks + p.recent + 1 > budget:
            budget = max(budget + 1, min(p.sinks + p.recent + 1, 2 * budget + 1))
        return budget
