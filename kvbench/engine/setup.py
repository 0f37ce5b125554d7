"""A method at a budget on a model, set up once for the engine, a replay or `EvictionCache`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvbench.engine.attention.geometry import LayerGeometry, largest_group
from kvbench.engine.attention.rope import read_rope
from kvbench.engine.cache.layout import Layout, Lengths, entry_budget, fit, make_cache, shape_of, stored_queries
from kvbench.engine.cache.slot_cache import SlotCache
from kvbench.engine.model.load import LoadedModel
from kvbench.engine.model.weights import load_weights
from kvbench.engine.rules import Rules
from kvbench.eviction.api import Method
from kvbench.eviction.trigger import Trigger


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Everything that follows from a method, a budget and a model before the first token.

    Attributes:
        budget: entries per layer and KV head, or as a float the share of each prompt; None: the method takes none.
        geometry: of the cache, see `layout.fit`.
        rules: without a budget, see `rules_for_prompt`.
        lengths: of the sequences to come.
    """

    loaded: LoadedModel
    method: Method
    budget: float | None
    interval: int
    lengths: Lengths
    geometry: tuple[LayerGeometry, ...]
    rules: Rules

    @property
    def trigger(self) -> Trigger:
        """The clock of evictions while decoding."""
        return self.method.during("decode").trigger(self.interval)

    @property
    def copies(self) -> int:
        """Heads of the cache that stand for one KV head; entries are reported per KV head."""
        return largest_group(self.loaded.geometry) if self.method.per_query_head else 1

    @property
    def prompt_queries(self) -> int:
        """How many of the newest queries are kept while a prompt is read."""
        return stored_queries(self.method, self.interval, self.lengths.total)[0] if self.method.evicts else 0

    def rules_for_prompt(self, tokens: int) -> Rules:
        """The rules with the budget of a prompt of so many tokens."""
        budget = entry_budget(self.method, self.budget, tokens, largest_group(self.loaded.geometry))
        return replace(self.rules, budget=budget)

    def cache(self, slots: int, layout: Layout = "auto") -> SlotCache:
        """An empty cache. Raises UserError for a layout that does not serve the method."""
        loaded = self.loaded
        shape = shape_of(loaded.geometry, self.method, self.budget, self.interval, self.lengths, slots)
        return make_cache(self.geometry, self.method, shape, loaded.device, loaded.dtype, layout)


def set_up(loaded: LoadedModel, method: Method, *, budget: float | None, interval: int, lengths: Lengths) -> Setup:
    """Raises UserError when the method cannot serve the model, SetupError when its weights are missing or another's."""
    return Setup(
        loaded=loaded,
        method=method,
        budget=budget,
        interval=interval,
        lengths=lengths,
        geometry=fit(loaded.geometry, method, lengths.total),
        rules=rules_for(method, loaded, interval),
    )


def rules_for(method: Method, loaded: LoadedModel, interval: int) -> Rules:
    """The method with its weights and the model's RoPE. Raises SetupError when its weights are missing or another's."""
    weights = {}
    if (needed := method.weights()) is not None:
        weights = load_weights(needed, loaded.folder, loaded.model.config, loaded.device, loaded.fingerprint)
    return Rules(
        method=method,
        budget=None,
        interval=interval,
        weights=weights,
        rope=read_rope(loaded.model) if method.needs().rope else None,
    )
