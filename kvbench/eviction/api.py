"""The interface of an eviction method: its declarations, and `score`, the one function that it must define.

A method is a frozen dataclass in one file under ``methods/``. Its fields are its options (``--method-opt
NAME=VALUE``), and `score` maps a `LayerView` to one float32 score per cached entry: **higher is kept**, even if the
paper keeps the lowest. The engine owns memory; a method never moves, counts or pads entries.

    @methods.register("knorm")
    @dataclass(frozen=True)
    class KNorm(Method):
        def score(self, view: LayerView) -> torch.Tensor:
            return -view.keys.norm(dim=-1)

Everything else has a default, which a method can override:

    tensors to read                needs()      the engine collects nothing else
    memory of an entry             columns()    tensors beside K and V; the engine moves them and counts their bytes
    memory of a layer              states()     tensors that belong to no entry, such as running moments of queries
    columns of new tokens          on_tokens()  values computed from hidden state, key and value
    time of eviction               trigger()    Every(interval), Once() after the prompt, Never()
    protected entries              protect()    sinks, recent tokens, the prompt
    competition for the budget     scope        within a head, a layer, or the whole model
    uneven budgets                 quotas()     entries per layer and head
    scores across layers           settled()    final scores, made from those of all layers, if the method is `joint`
    a budget that is not constant  allowed()    entries that may stay after an eviction
    extra tokens to run            probes()     read against the prompt's cache, for observe(), then dropped
    votes that are sums            summed()     the number of queries whose attention a score sums
    learned weights and tables     weights()    loaded, checked, and given as view.weights
    all layers in one call         stacked      faster, above all on a GPU; then `score` must not read `view.layer`

Shapes: b sequences, L layers, Hk KV heads, Hq query heads, g = Hq // Hk, N entries, w queries, d head dimension,
T tokens seen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvbench.errors import BudgetViolation, PluginError, quote
from kvbench.eviction.columns import GivenColumn
from kvbench.eviction.declare import Allocation as Allocation
from kvbench.eviction.declare import Column as Column
from kvbench.eviction.declare import Needs as Needs
from kvbench.eviction.declare import Phase as Phase
from kvbench.eviction.declare import Probe as Probe
from kvbench.eviction.declare import Prompt as Prompt
from kvbench.eviction.declare import Protect as Protect
from kvbench.eviction.declare import ScoreOut as ScoreOut
from kvbench.eviction.declare import State as State
from kvbench.eviction.declare import Weights as Weights
from kvbench.eviction.options import OptionError, check_values
from kvbench.eviction.options import option as option  # method files take these from here
from kvbench.eviction.protection import OWN, TERMS, Protection, parse_protection
from kvbench.eviction.trigger import Every as Every
from kvbench.eviction.trigger import EveryTime as EveryTime
from kvbench.eviction.trigger import Never as Never
from kvbench.eviction.trigger import Once as Once
from kvbench.eviction.trigger import TopK as TopK
from kvbench.eviction.trigger import Trigger as Trigger
from kvbench.lazy import torch

if TYPE_CHECKING:
    from kvbench.eviction.new_tokens import NewTokens
    from kvbench.eviction.view import LayerView

LARGE = 1 << 30  # a budget above all that users give


@dataclass(frozen=True)
class Method(ABC):
    """Base of all methods. Subclasses are frozen dataclasses; their fields are the options.

    Class attributes:
        paper: authors and arXiv id.
        kind: the source of the scores, for ``kvbench list``: attention, keys, position, noise, probes, weights, oracle,
            press (a method of kvpress), none.
        scope: where entries compete for the budget: within a "head", a "layer" (all its heads), or the "model".
        version: raise it when scores change, so that old and new rows do not share a table.
        joint: whether `quotas` or `settled` must see all layers at once.
        stacked: whether `score` and `observe` also take a `StackView`. It shows several layers at once, so both
            functions must not read `view.layer`. A subclass that defines its own `score` or `observe` does not inherit
            `stacked`: it must set it again, or it gets one layer at a time.
        trained: whether the method needs weights trained for the model.
        oracle: whether the method reads the rest of a finished sequence, so that only `kvbench replay` can run it.
        evicts: False for the full cache.
        ragged: whether `score` takes views whose heads hold different numbers of entries.
        aligned: whether all heads of a layer keep the same tokens. needs_aligned: whether `score` relies on this.
    """

    paper: ClassVar[str] = ""
    version: ClassVar[str] = "1"
    kind: ClassVar[str] = "attention"
    scope: ClassVar[Literal["head", "layer", "model"]] = "head"
    joint: ClassVar[bool] = False
    stacked: ClassVar[bool] = False
    trained: ClassVar[bool] = False
    oracle: ClassVar[bool] = False
    evicts: ClassVar[bool] = True
    ragged: ClassVar[bool] = True
    aligned: ClassVar[bool] = False
    needs_aligned: ClassVar[bool] = False

    # Every method has this option, so that all can be compared under one protection.
    protection: str = field(default=OWN, kw_only=True, metadata={"help": f"what always stays: {TERMS}"})

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if {"score", "observe"} & cls.__dict__.keys() and "stacked" not in cls.__dict__:
            cls.stacked = False

    def __post_init__(self) -> None:
        check_values(self)
        try:
            replaced = parse_protection(self.protection)
        except ValueError:
            raise OptionError("protection", f"takes {TERMS}; got {quote(self.protection)}.") from None
        if replaced is not None:
            object.__setattr__(self, "protection", str(replaced))  # one spelling, because rows and labels show it
            self._check_replaced(replaced)

    def _check_replaced(self, replaced: Protection) -> None:
        """Raise OptionError if the method cannot work under `replaced`, the protection that its option `protection`
        names."""
        if not self.takes_budget:
            raise OptionError("protection", "is for methods that take a budget; leave it out.")
        if replaced.recent < (newest := self.unscored()):
            raise OptionError(
                "protection",
                f"must keep the newest {newest} tokens, which the method does not score: give recent={newest} or more; "
                f"got {quote(self.protection)}.",
            )

    @abstractmethod
    def score(self, view: LayerView) -> torch.Tensor | ScoreOut:
        """Return a score per entry of one layer, [b, Hk, N] float32; higher is kept."""

    def observe(self, view: LayerView) -> dict[str, torch.Tensor]:
        """Return new values of columns and states, given a block of queries (`view.queries`).

        The engine calls this function with every query if the method declares `Needs(queries="since_last")`; with
        `Needs.sums`, it may give `view.sums` in place of the queries of generated tokens. It also calls the function
        with the queries of every probe that the method yields; `view.probe` is then set.
        """
        raise TypeError(f"{type(self).__name__} needs every query or yields probes, so it must define observe()")

    def on_tokens(self, new: NewTokens) -> dict[str, torch.Tensor]:
        """Return, by column name, the values [b, Hk, t] of every `GivenColumn` for t new tokens of prompt or answer.

        The engine calls this function only if `reads_tokens` is true. Raises PluginError if the method declares a
        `GivenColumn` and does not override this function.
        """
        raise PluginError(f"{type(self).__name__} declares a GivenColumn, so it must define on_tokens().")

    @property
    def reads_tokens(self) -> bool:
        """Whether the engine calls `on_tokens`: the method overrides it, or declares a `GivenColumn`."""
        own = type(self).on_tokens is not Method.on_tokens
        return own or any(isinstance(column, GivenColumn) for column in self.columns())

    def needs(self) -> Needs:
        return Needs()

    def columns(self) -> tuple[Column, ...]:
        return ()

    def states(self) -> tuple[State, ...]:
        return ()

    def protect(self, budget: int) -> Protect:
        return Protect()

    def unscored(self) -> int:
        """Return how many of the newest tokens the method cannot score, so that every protection must keep them.

        By default the number is 0. With Needs(queries="window") the window's queries score the older entries, and the
        number is the smaller of two: the size of the window, and how many recent tokens `protect` keeps.
        """
        needs = self.needs()
        return min(needs.width, self.protect(LARGE).recent) if needs.queries == "window" else 0

    def summed(self, view: LayerView) -> int:
        """Return the number of queries over which the scores are sums; 1 if they are means, or no attention.

        criticalkv divides the scores by this number.
        """
        return 1

    @cached_property
    def replaced(self) -> Protection | None:
        """The protection that replaces the method's own; None if the option `protection` is `own`."""
        return parse_protection(self.protection)

    def keeps_always(self, budget: int) -> Protect:
        """Return the protection that applies at this budget: the method's own (`protect`), unless its option
        `protection` replaces it."""
        return self.protect(budget) if self.replaced is None else self.replaced.at(budget)

    def trigger(self, interval: int) -> Trigger:
        return Every(interval)

    def selector(self) -> TopK:
        return TopK()

    def quotas(self, allocation: Allocation) -> torch.Tensor | None:
        """Return how many entries each head keeps, protected ones included: int64 [b, L, Hk] over `allocation.layers`.

        The sum over the whole model must be at most layer_count * Hk * budget. None: every head keeps `budget` entries.
        With scope "layer" the heads of a layer share the sum of their quotas; with scope "model" quotas have no effect.
        """
        return None

    def settled(self, views: Sequence[LayerView], outs: list[ScoreOut]) -> list[ScoreOut]:
        """Return the final scores of all layers, one `ScoreOut` per view; called only if the method is `joint`.

        outs: what `score` returned for each of the views, which together show all layers that evict.
        """
        return outs

    def allowed(self, budget: int | None, prompt_len: int, seen: int, evictions: int) -> int:
        """Return how many entries may stay after an eviction, per layer and head of the cache; by default the budget.

        budget: None if, and only if, the method takes no budget. prompt_len: tokens of the prompt; seen: tokens of
        prompt and answer so far; evictions: earlier evictions of this sequence.
        """
        if budget is None:
            raise TypeError(f"{type(self).__name__} takes no budget but does not define allowed()")
        return budget

    def probes(self, prompt: Prompt) -> Generator[Probe, int, None]:
        """Yield probes to run after the prompt was read.

        If the method declares Needs(probes=True), the engine calls this function for each prompt from which entries
        must be evicted. Each `yield` then returns the greedy next token after the probe's last token. The memory plan
        calls this function with a prompt of zeros; each `yield` then returns 0.
        """
        yield from ()

    def drafts(self) -> tuple[str, ...]:
        """Return the names of the draft models that `probes` uses, by default none.

        A method that needs a draft model raises UserError if the user named none.
        """
        return ()

    def weights(self) -> Weights | None:
        return None

    def notes(self) -> tuple[str, ...]:
        """Return sentences that a user should read before a run with the method."""
        return ()

    def during(self, phase: Phase) -> Method:
        """Return the method that decides in a phase (prefill or decode): `self`, or one of two combined methods."""
        return self

    def options(self) -> dict[str, Any]:
        """Return the method's own options and their values, and the option `protection` unless it is `own`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if (name, value) != ("protection", OWN)}

    @property
    def takes_budget(self) -> bool:
        """Whether the user must give a budget. False for the full cache, and for a method whose own options decide how
        many entries stay."""
        return self.evicts

    @property
    def decode_bounded(self) -> bool:
        """Whether a budget bounds the cache while decoding, because entries of generated tokens are evicted too."""
        return self.trigger(1).growth is not None

    @property
    def uniform(self) -> bool:
        """Whether all layers and heads keep equally many entries."""
        return self.scope == "head" and type(self).quotas is Method.quotas

    @property
    def per_query_head(self) -> bool:
        """Whether every query head has its own cache; the query heads of a group then split their KV head's budget."""
        return False

    @property
    def layerwise(self) -> bool:
        """Whether the entries that one layer keeps can be chosen without the scores of the other layers."""
        evenly = self.replaced is None or self.uniform  # else quotas may move between layers (`select._with_room`)
        return self.scope != "model" and not self.joint and evenly

    def min_budget(self) -> int:
        """Return the smallest budget with room for the protected sinks and recent tokens and for one other entry.

        Raises BudgetViolation if no sampled budget has such room.
        """
        # Protection may depend on the budget (h2o keeps budget // 2), so search for the first budget that fits. Sample
        # large and small budgets first: where none fits, the search would try every budget.
        if not any(self._fits(budget) for budget in (*range(LARGE, LARGE + 64), *range(1, 65))):
            raise BudgetViolation(
                f"{type(self).__name__}.protect() fills every budget; it must leave room for one entry more."
            )
        budget = 1
        while not self._fits(budget):
            p = self.keeps_always(budget)
            budget = max(budget + 1, min(p.sinks + p.recent + 1, 2 * budget + 1))
        return budget

    def _fits(self, budget: int) -> bool:
        """Return whether a budget has room for the protected sinks and recent tokens and for one other entry."""
        protect = self.keeps_always(budget)
        return protect.sinks + protect.recent < budget
