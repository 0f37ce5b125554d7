"""A method at a budget on a model, prepared once for the engine, a replay or `EvictionCache`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvbench.engine.attention.geometry import LayerGeometry, largest_group
from kvbench.engine.attention.rope import read_rope
from kvbench.engine.cache.layout import (
    Layout,
    Lengths,
    entry_budget,
    fit,
    make_cache,
    shape_of,
    stored_hidden,
    stored_queries,
    ticks_every,
)
from kvbench.engine.cache.slot_cache import SlotCache
from kvbench.engine.model.layer_weights import layer_weights
from kvbench.engine.model.load import LoadedModel
from kvbench.engine.model.marks import marks
from kvbench.engine.model.own_attention import own_attention
from kvbench.engine.model.weights import load_weights
from kvbench.engine.probes import check_probes
from kvbench.engine.rules import Rules
from kvbench.eviction.api import Method
from kvbench.eviction.trigger import Trigger


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A method at a budget on a loaded model, with all that can be computed before the first token.

    Attributes:
        budget: entries per layer and KV head, or a float: the share of each prompt. None: the method takes no budget.
        interval: generated tokens between two ticks (`layout.ticks_every`).
        geometry: the cache's geometry, see `layout.fit`.
        rules: the rules without a budget; `rules_for_prompt` adds the budget.
        lengths: the most tokens of a sequence that the cache must hold (`layout.Lengths`).
        sums: whether decode steps sum the attention that entries receive (`layout.sums_attention`).
    """

    loaded: LoadedModel
    method: Method
    budget: float | None
    interval: int
    lengths: Lengths
    geometry: tuple[LayerGeometry, ...]
    rules: Rules
    sums: bool = False

    @property
    def trigger(self) -> Trigger:
        """The trigger that says when an eviction is due while decoding."""
        return self.method.during("decode").trigger(self.interval)

    @property
    def copies(self) -> int:
        """Heads of the cache per KV head of the model; more than 1 for methods that keep entries per query head."""
        return largest_group(self.loaded.geometry) if self.method.per_query_head else 1

    @property
    def prompt_queries(self) -> int:
        """Number of newest queries that each layer stores while a prompt is read."""
        if not self.method.evicts:
            return 0
        return stored_queries(self.method, self.interval, self.lengths.total, self.sums)[0]

    @property
    def stored_hidden(self) -> tuple[int, int]:
        """How many hidden states a layer stores (`layout.stored_hidden`); (0, 0) if the method evicts nothing."""
        return stored_hidden(self.method, self.interval, self.lengths.total) if self.method.evicts else (0, 0)

    def rules_for_prompt(self, tokens: int) -> Rules:
        """Return the rules for a prompt of `tokens` tokens: `rules` with the budget for this prompt, in entries."""
        budget = entry_budget(self.method, self.budget, tokens, largest_group(self.loaded.geometry))
        return replace(self.rules, budget=budget)

    def cache(self, slots: int, layout: Layout = "auto") -> SlotCache:
        """Return an empty cache. Raises UserError when the layout does not support the method."""
        loaded = self.loaded
        shape = shape_of(
            *(loaded.geometry, self.method, self.budget, self.interval, self.lengths, slots, loaded.states),
            sums=self.sums,
        )
        return make_cache(self.geometry, self.method, shape, loaded.device, loaded.dtype, layout)


def set_up(
    loaded: LoadedModel,
    method: Method,
    *,
    budget: float | None,
    interval: int,
    lengths: Lengths,
    kernels: bool = False,
    sums: bool = False,
) -> Setup:
    """Set up a method on a loaded model.

    interval: as the user gives it, see `layout.ticks_every`. kernels: whether the method's code may run Triton kernels,
    which need a GPU. sums: see `Setup`.

    Raises UserError when the method does not support the model (`layout.fit`), and the errors of `rules_for`.
    """
    geometry = fit(loaded.geometry, method, lengths.total)
    interval = ticks_every(method, interval, largest_group(loaded.geometry))
    return Setup(
        loaded=loaded,
        method=method,
        budget=budget,
        interval=interval,
        lengths=lengths,
        geometry=geometry,
        rules=replace(rules_for(method, loaded, interval, geometry), kernels=kernels),
        sums=sums,
    )


def rules_for(method: Method, loaded: LoadedModel, interval: int, geometry: Sequence[LayerGeometry]) -> Rules:
    """Return the rules of a method, without a budget: its weights and, if it needs them, the model's RoPE and matrices.

    geometry: the cache's geometry.

    Raises:
        UserError: The method needs trained weights, its options name no file, and the model's folder has none. Or the
            method needs the model's RoPE, attention modules, matrices or tokenizer, but cannot use those of this model.
            It cannot use a matrix that is quantised, or divided among devices. Or the weights are untrained in a layer
            that the method evicts, or the method reads learned tokens and the model does not support them.
        SetupError: A table is missing, or a file that the options name; or weights are damaged or do not fit the model
            or the method's options.
    """
    weights, needs = {}, method.needs()
    check_probes(method, loaded.model.config)
    if (needed := method.weights()) is not None:
        model = loaded.folder, loaded.model.config, loaded.device, loaded.fingerprint
        weights = load_weights(needed, *model, layers=[g.index for g in geometry if g.evicts])
    return Rules(
        method=method,
        budget=None,
        interval=interval,
        weights=weights,
        elsewhere={
            device: {name: weight.to(device) for name, weight in weights.items()}
            for device in {g.device for g in geometry if g.device is not None}
        },
        rope=read_rope(loaded.model, geometry) if needs.rope else None,
        layer_weights=layer_weights(loaded.model, geometry, needs.layer_weights),
        marks=marks(loaded, needs.marks) if needs.marks else None,
        attention=own_attention(loaded.model, geometry, needs.attention),
    )
