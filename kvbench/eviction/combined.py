"""Two methods under one budget: in ``snapkv+gkv``, snapkv evicts after the prompt and gkv while decoding."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvbench.errors import UserError, bare, quote
from kvbench.eviction.api import Column, Method, Needs, Phase, Probe, Prompt, Protect, State, Trigger, Weights
from kvbench.eviction.learned import LearnedWeights
from kvbench.eviction.modality import MODALITY
from kvbench.eviction.returned import observed
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch

if TYPE_CHECKING:
    from kvbench.eviction.new_tokens import NewTokens


@dataclass(frozen=True)
class Combined(Method):
    """Two methods: `first` decides right after the prompt, `second` at every later eviction.

    Each method has its own options. Raises UserError for two methods that cannot be combined.
    """

    names: tuple[str, str]
    first: Method
    second: Method

    def __post_init__(self) -> None:
        for name, part in zip(self.names, (self.first, self.second)):
            if not part.takes_budget:
                raise UserError(f"method {quote(name)} takes no budget and cannot be combined; give it alone.")
            if part.during("prefill") is not part:
                raise UserError(f"method {quote(name)} combines two methods already; give it alone, without a '+'.")
        if not self.second.decode_bounded:
            raise UserError(
                f"method {quote(self.names[1])} evicts nothing while decoding; "
                "after the '+', give a method that evicts while decoding ('kvbench list methods' shows which)."
            )
        if not (self.second.ragged or (self.first.uniform and not self.first.per_query_head)):
            raise UserError(
                f"method {quote(self.names[1])} needs equally many entries in every KV head, but "
                f"{quote(self.names[0])} keeps different numbers; give another method before the '+'."
            )
        if self.second.needs_aligned and not self.first.aligned:
            raise UserError(
                f"method {quote(self.names[1])} needs the same tokens in all heads of a layer, but "
                f"{quote(self.names[0])} may keep other tokens in each head; replace one of the two methods."
            )
        for name, part, other in zip(self.names, (self.first, self.second), reversed(self.names)):
            if self.per_query_head and isinstance(part.weights(), LearnedWeights):
                raise UserError(
                    f"method {quote(name)} has trained weights, which need entries per KV head, but {quote(other)} "
                    f"keeps entries per query head; give {bare(other)}.heads=kv."
                )
        both = f"methods {quote(self.names[0])} and {quote(self.names[1])}"
        remedy = "so they cannot be combined; give one of them."
        if set(_memories(self.first)) & set(_memories(self.second)):
            raise UserError(f"{both} keep columns or states of the same name, {remedy}")
        if len({part.needs().marks for part in (self.first, self.second)} - {""}) > 1:
            raise UserError(f"{both} look for different separators ('marks'), {remedy}")
        if self.first.weights() and self.second.weights():
            raise UserError(f"{both} both need weights, {remedy}")

    def during(self, phase: Phase) -> Method:
        return self.first if phase == "prefill" else self.second

    def score(self, view: LayerView) -> torch.Tensor:
        raise TypeError("two combined methods have no common score; call `during` for the one that decides in a phase")

    def observe(self, view: LayerView) -> dict[str, torch.Tensor]:
        if view.probe is not None:
            return observed(self.first, view)
        values: dict[str, torch.Tensor] = {}
        for part in (self.first, self.second):
            if part.needs().queries == "since_last":
                values |= observed(part, view)
        return values

    def on_tokens(self, new: NewTokens) -> dict[str, torch.Tensor]:
        values: dict[str, torch.Tensor] = {}
        for part in (self.first, self.second):
            if part.reads_tokens:
                values |= part.on_tokens(new)
        return values

    @property
    def reads_tokens(self) -> bool:
        return self.first.reads_tokens or self.second.reads_tokens

    def needs(self) -> Needs:
        a, b = self.first.needs(), self.second.needs()
        kinds = {a.queries, b.queries}
        queries = next(kind for kind in ("since_last", "window", "last", "none") if kind in kinds)
        return Needs(
            queries=queries,
            window=max(a.window if a.newest else a.width, b.window if b.newest else b.width),
            newest=tuple(dict.fromkeys(a.newest + b.newest)),
            values=a.values or b.values,
            keys=a.keys or b.keys,
            rope=a.rope or b.rope,
            probes=a.probes,
            prompt=a.prompt,
            layer_weights=tuple(dict.fromkeys(a.layer_weights + b.layer_weights)),
            marks=a.marks or b.marks,
            hidden=b.hidden,
            prompt_hidden=max(a.prompt_hidden, b.hidden),
            attention=_common(a.attention, b.attention),
        )

    def columns(self) -> tuple[Column, ...]:
        return tuple(dict.fromkeys(self.first.columns() + self.second.columns()))

    def states(self) -> tuple[State, ...]:
        return self.first.states() + self.second.states()

    def protect(self, budget: int) -> Protect:
        """Return the union of what the two methods protect, for messages about the budget. An eviction does not use
        this union. It uses only the protection of the method that decides."""
        a, b = self.first.keeps_always(budget), self.second.keeps_always(budget)
        return Protect(
            sinks=max(a.sinks, b.sinks),
            recent=max(a.recent, b.recent),
            prompt=a.prompt or b.prompt,
            prompt_most=_most(a, b),
            text=a.text or b.text,
        )

    def trigger(self, interval: int) -> Trigger:
        return self.second.trigger(interval)

    def probes(self, prompt: Prompt) -> Generator[Probe, int, None]:
        yield from self.first.probes(prompt)

    def drafts(self) -> tuple[str, ...]:
        return self.first.drafts()

    def weights(self) -> Weights | None:
        return self.first.weights() or self.second.weights()

    def notes(self) -> tuple[str, ...]:
        return self.first.notes() + self.second.notes()

    def options(self) -> dict[str, Any]:
        return {
            f"{name}.{option}": value
            for name, part in zip(self.names, (self.first, self.second))
            for option, value in part.options().items()
        }

    @property
    def uniform(self) -> bool:
        return self.first.uniform and self.second.uniform

    @property
    def layerwise(self) -> bool:
        return self.first.layerwise and self.second.layerwise

    def min_budget(self) -> int:
        return max(self.first.min_budget(), self.second.min_budget())

    @property
    def per_query_head(self) -> bool:
        return self.first.per_query_head or self.second.per_query_head


def _most(a: Protect, b: Protect) -> int | None:
    """Return `Protect.prompt_most` of the union of two protections. Only protections that protect the prompt count. The
    result is the larger limit; None if one of these protections has no limit, or if neither protects the prompt."""
    limits = [protect.prompt_most for protect in (a, b) if protect.prompt]
    return None if None in limits or not limits else max(limit for limit in limits if limit is not None)


def _common(a: tuple[str, ...], b: tuple[str, ...]) -> tuple[str, ...]:
    """Return the classes of attention modules that both methods can read. If one method reads no attention module, its
    tuple is empty, and the classes of the other method are returned."""
    return tuple(name for name in a if name in b) if a and b else a or b


def _memories(method: Method) -> list[str]:
    """Return the names of the columns and states that a method writes."""
    return [c.name for c in method.columns() if c != MODALITY] + [s.name for s in method.states()]
