"""Records the logits from which the engine draws tokens, and the first views of a cache that methods receive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from typing import Any
from unittest.mock import patch

import torch

from kvbench.audit.invariants.scramble import mapped
from kvbench.engine import sampler
from kvbench.eviction import select
from kvbench.eviction.api import Method
from kvbench.eviction.view import LayerView, StackView
from kvbench.records import Sampling

MOST = 2  # views recorded per kind of decision or observation


@dataclass
class Seen:
    """The record of one generation: the logits from which tokens were drawn, and the views that methods received."""

    logits: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)  # (noise key, step) -> [V]
    decisions: list[tuple[Method, list[LayerView]]] = field(default_factory=list)
    observations: list[tuple[Method, LayerView]] = field(default_factory=list)


@contextmanager
def watching(method: Method) -> Iterator[Seen]:
    """Record all logits and the first views (`MOST` of each kind) until the `with` statement ends, by replacing
    functions of the engine and the method."""
    seen, draw, decide = Seen(), sampler.draw, select.decide
    kinds: dict[Any, int] = {}

    def new(*kind: Any) -> bool:
        kinds[kind] = kinds.get(kind, 0) + 1
        return kinds[kind] <= MOST

    def drawn(logits: torch.Tensor, keys: torch.Tensor, steps: torch.Tensor, sampling: Sampling) -> torch.Tensor:
        for row, key, step in zip(logits, keys.tolist(), steps.tolist()):
            seen.logits[key, step] = row.clone()
        return draw(logits, keys, steps, sampling)

    def decided(method: Method, views: Sequence[LayerView]) -> list[select.Decision]:
        # A stacked view is recorded as the decisions of its layers.
        for shown in [[v] for v in by_layer(views[0])] if isinstance(views[0], StackView) else [list(views)]:
            first = shown[0]
            # Kinds differ in: first or later eviction, one sequence or a batch, and which of two combined methods.
            if new("decide", type(method), int(first.eviction_index.max()) > 0, len(first.seen) > 1):
                seen.decisions.append((method, [_copied(view) for view in shown]))
        return decide(method, views)

    def observed(original: Any) -> Any:
        def spy(self: Method, view: LayerView) -> dict[str, torch.Tensor]:
            for shown in by_layer(view) if isinstance(view, StackView) else [view]:
                if new("observe", shown.probe is not None, int(shown.eviction_index.max()) > 0):
                    seen.observations.append((self, _copied(shown)))
            values: dict[str, torch.Tensor] = original(self, view)
            return values

        return spy

    # Read before any is replaced: of two classes, one may inherit from the other.
    observers = {type(part): type(part).observe for part in (method.during("prefill"), method.during("decode"))}
    with ExitStack() as stack:
        stack.enter_context(patch.object(sampler, "draw", drawn))
        stack.enter_context(patch.object(select, "decide", decided))
        for cls, original in observers.items():
            if original is not Method.observe:
                stack.enter_context(patch.object(cls, "observe", observed(original)))
        yield seen


def by_layer(view: StackView) -> Iterator[LayerView]:
    """Split a view that shows several layers at once (a stacked view), and yield one view per layer."""
    for layer in view.layers.unique().tolist():
        rows = mapped(view, lambda tensor, mine=view.layers == layer: tensor[mine])  # type: ignore[misc]
        names = [f.name for f in fields(LayerView) if f.name not in ("layer", "ordinal")]
        yield LayerView(layer=layer, **{name: getattr(rows, name) for name in names})


def _copied(view: LayerView) -> LayerView:
    """Return a copy of a view. The engine reuses the tensors of the view itself, so the view changes later."""
    return mapped(view, torch.clone)
