"""Counts the bytes that a method's scores and decisions take beside the cache: the method's own code runs on the meta
device, on views of the sizes that an eviction will show it.

Letters: b sequences, w queries, N entries per head.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvbench.engine.attention.geometry import LayerGeometry
from kvbench.engine.cache.slot_cache import Shape
from kvbench.engine.cache.stack import at_once as views_at_once
from kvbench.engine.meta import Answers, MetaBytes
from kvbench.engine.model.own_attention import own_attention
from kvbench.engine.model.random_weights import shapes_of
from kvbench.engine.rules import Batch, Rows, Rules
from kvbench.eviction import select
from kvbench.eviction.api import Method, Probe
from kvbench.eviction.checks import unread
from kvbench.eviction.columns import expanded
from kvbench.eviction.planned_device import planned_for
from kvbench.eviction.rope import Rope
from kvbench.eviction.view import LayerView

META = torch.device("meta")
CHARACTERS = 4  # per token, about
COUNTED = (1, 8, 64)  # slots for which evictions are counted; between these, bytes lie close to straight lines
INDEX = 8  # bytes of an index
BOUND = 3  # float32 copies of a layer's keys, counted for code that fails without values


@dataclass(frozen=True, slots=True)
class Shown:
    """What an eviction shows a method at once.

    Attributes:
        b: sequences; of a stacked method also their layers, each as a sequence of its own.
        entries: places per head; queries, hidden: newest queries and hidden states.
        together: how many layers are decided together.
        probe: length of the probe whose newest queries they are; 0: they are no probe's.
        copied: whether the view copies the entries, as a view of a paged cache does.
    """

    b: int
    entries: int
    queries: int
    hidden: int = 0
    together: int = 1
    probe: int = 0
    copied: bool = False


@dataclass(frozen=True, slots=True)
class Ticks:
    """Scratch bytes of evictions while decoding.

    sizes: pairs of slots and bytes, from one slot on, ascending. most: slots that are evicted at once.
    """

    sizes: tuple[tuple[int, int], ...]
    most: int

    def at(self, slots: int) -> int:
        """Return the bytes with this many slots, on straight lines through the counted ones."""
        together, (before, after) = min(slots, self.most), (self.sizes[0], self.sizes[-1])
        for pair in itertools.pairwise(self.sizes):
            before, after = pair
            if together <= after[0]:
                break
        slope = (after[1] - before[1]) / max(1, after[0] - before[0])
        return round(before[1] + (together - before[0]) * slope)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """Counts what the code of one method takes on one model.

    Attributes:
        method: as chosen; in a combined method "a+b", both parts' columns are stored.
        geometry: of the evicted layers in the cache.
        model: returns the model without weights, on the meta device.
        gpu: whether to count for a GPU. budget: entries per head that an eviction leaves.
    """

    method: Method
    geometry: tuple[LayerGeometry, ...]
    model: Callable[[], Any]
    dtype: torch.dtype
    gpu: bool
    interval: int
    budget: int

    def observed(self, rows: int, block: int) -> int:
        """Return the bytes while the method observes the queries of a prompt with `rows` entries per head, `block` at
        a time."""
        acting = self.method.during("prefill")
        if not acting.evicts or acting.needs().queries != "since_last":
            return 0
        full = min(block, rows)  # queries of the last full block
        return self._observing(acting, Shown(1, rows - rows % full, full))

    def probed(self, rows: int, block: int) -> tuple[int, int]:
        """Return the most tokens of the method's probes, and the bytes while it observes their queries."""
        acting = self.method.during("prefill")
        if not acting.evicts or not acting.needs().probes:
            return 0, 0
        length = self._longest_probe(acting, rows)
        return length, self._observing(acting, Shown(1, rows, min(block, length), probe=length))

    def decided(self, rows: int) -> int:
        """Return the bytes of the eviction of a prompt with `rows` entries per head."""
        acting = self.method.during("prefill")
        if not acting.evicts:
            return 0
        needs, together = acting.needs(), 1 if acting.layerwise else len(self.geometry)
        return self._deciding(acting, Shown(1, rows, needs.width, min(rows, needs.prompt_hidden), together))

    def of_ticks(self, held: Shape, at_once: int) -> Ticks:
        """Return the bytes of evictions while decoding. held: a slot's entries; at_once: most bytes of a view."""
        acting = self.method.during("decode")
        if not acting.evicts or acting.trigger(self.interval).growth is None:
            return Ticks(((1, 0),), 1)
        layers, needs = len(self.geometry), acting.needs()
        together = layers if acting.stacked or not acting.layerwise else 1
        fitting = max(1, views_at_once(self.geometry[0], held.rows, needs.width, at_once) // together)
        counted = sorted({min(fitting, slots) for slots in COUNTED})
        return Ticks(tuple((slots, self._tick(acting, held, slots, together)) for slots in counted), fitting)

    def _tick(self, acting: Method, held: Shape, slots: int, together: int) -> int:
        """Return the bytes while `slots` slots are evicted at once. together: layers in a view, or in a decision."""
        needs, copied = acting.needs(), not self.method.uniform
        entries = held.longest if copied and not held.bounded else held.rows  # of the longest head
        b, joint = (slots, together) if not acting.layerwise else (slots * together, 1)
        shown = Shown(b, entries, needs.width, needs.hidden, joint, copied=copied)
        observed = 0
        if needs.queries == "since_last":
            seen = replace(shown, b=slots * (together if acting.stacked else 1), queries=held.queries, together=1)
            observed = self._observing(acting, seen)
        return max(observed, self._deciding(acting, shown), slots * together * self._compacting(held))

    def _compacting(self, held: Shape) -> int:
        """Return the bytes of closing the gaps in one layer of a slot: entries and places of the moved, and ranks."""
        g, moved = self.geometry[0], max(0, held.rows - self.budget)
        return g.kv_heads * (
            moved * (max(g.head_dim, g.value_dim) * self.dtype.itemsize + 4 * INDEX) + 3 * INDEX * held.rows
        )

    def _deciding(self, acting: Method, shown: Shown) -> int:
        """Return the most bytes while `acting` decides about these views, with what the views copy."""
        return _peak(self, acting, shown, False)

    def _observing(self, acting: Method, shown: Shown) -> int:
        """Return the most bytes while `acting` observes the queries of such a view."""
        return _peak(self, acting, shown, True)

    def layers(self) -> list[LayerGeometry]:
        return [replace(g, device=None) for g in self.geometry]

    def views(self, acting: Method, rules: Rules, shown: Shown) -> Iterator[LayerView]:
        """Yield views of meta tensors: of each layer that is decided together, or one view of them all if stacked."""
        layers = self.layers()
        ordinals = {g.index: i for i, g in enumerate(layers)}
        stacked, together = acting.stacked and not shown.probe, layers[: shown.together]
        for g in together[:1] if stacked else together:
            some = tuple(layer.index for layer in together) if len(together) > 1 else ()
            b = shown.b * len(together) if stacked else shown.b
            yield rules.view(
                g,
                ordinals,
                self._rows(g, b, shown.entries),
                self._batch(b, shown.entries, _numbers(b) if stacked else None, some if stacked else ()),
                queries=self._floats(b, g.query_heads, shown.queries, g.head_dim),
                query_positions=_numbers(b, shown.queries),
                hidden=self._floats(b, shown.hidden, g.hidden) if shown.hidden else None,
                states={s.name: torch.empty(b, *g.state_shape(s), device=META) for s in self.method.states()},
                **(self._probe(g, b, shown.probe) if shown.probe else {}),
            )

    def rules(self, acting: Method) -> Rules:
        layers = self.layers()
        needs = acting.needs()
        return Rules(
            method=acting,
            budget=self.budget,
            interval=self.interval,
            weights=self._weights(acting),
            rope=Rope(torch.empty(layers[0].head_dim // 2, device=META)) if needs.rope else None,
            attention=own_attention(self.model(), layers, needs.attention) if needs.attention else {},
        )

    def _weights(self, acting: Method) -> dict[str, torch.Tensor]:
        declared = acting.weights()
        shapes = {} if declared is None else shapes_of(declared, self.model())
        return {name: torch.empty(tuple(shape), device=META) for name, shape in shapes.items()}

    def _floats(self, *size: int) -> torch.Tensor:
        return torch.empty(size, dtype=self.dtype, device=META)

    def _rows(self, g: LayerGeometry, b: int, entries: int) -> Rows:
        size = b, g.kv_heads, entries
        names = [column.name for column in expanded(self.method.columns(), g.group)]
        valid = None if self.method.uniform else torch.ones(size, dtype=torch.bool, device=META)
        columns = {name: torch.empty(size, device=META) for name in names}
        keys, values = self._floats(*size, g.head_dim), self._floats(*size, g.value_dim)
        return Rows(keys, values, _numbers(*size), columns, valid)

    def _batch(self, b: int, entries: int, layers: torch.Tensor | None, together: tuple[int, ...]) -> Batch:
        return Batch(
            seen=_numbers(b),
            longest=entries,
            prompt_len=_numbers(b),
            evictions=_numbers(b),
            noise_key=_numbers(b),
            allowed=self.budget,
            layers=layers,
            together=together,
        )

    def _longest_probe(self, acting: Method, rows: int) -> int:
        """Return the most tokens of a probe that the method makes for a prompt of `rows` tokens; `rows` if the method
        needs more than a made-up prompt."""
        longest = 0
        try:
            weights, steps = self._weights(acting), acting.probes(_MadeUp((0,) * rows, self.budget))
            probe = next(steps)
            while True:
                longest = max(longest, len(weights[probe.learned]) if probe.learned else len(probe.tokens))
                probe = steps.send(0)
        except StopIteration:
            return longest
        except Exception:  # the code of a plug-in, or a model that needs weights
            return rows

    def _probe(self, g: LayerGeometry, b: int, length: int) -> dict[str, Any]:
        keys = self._floats(b, g.kv_heads, length, g.head_dim)
        return {"probe": Probe(tokens=(0,) * length), "probe_keys": keys, "probe_positions": _numbers(b, length)}


@functools.lru_cache(maxsize=256)
def _peak(scratch: Scratch, acting: Method, shown: Shown, observed: bool) -> int:
    answers = Answers(number=scratch.budget, marked=lambda length: min(length, scratch.budget))
    try:
        rules = scratch.rules(acting)
        with torch.inference_mode(), unread(), planned_for(gpu=scratch.gpu), MetaBytes(answers) as live:
            views, given = list(scratch.views(acting, rules, shown)), 0
            if not shown.copied:  # positions are copied, the other tensors are parts of the cache
                given = live.now - sum(view.positions.nbytes for view in views)
                live.peak = live.now
            if observed:
                acting.observe(views[0])
            else:
                select.decide(acting, views)
        return live.peak - given
    except Exception:  # the code of a plug-in may need values, or leave torch
        layers = shown.together if acting.stacked else 1
        return BOUND * 4 * shown.b * layers * shown.entries * max(g.kv_heads * g.head_dim for g in scratch.geometry)


@dataclass(slots=True)
class _MadeUp:
    """A prompt of zeros, as a method's `probes` reads it."""

    ids: tuple[int, ...]
    budget: int
    next_token: int = 0
    reply_header: tuple[int, ...] = (0,) * 4

    def encode(self, text: str) -> tuple[int, ...]:
        return (0,) * max(1, len(text) // CHARACTERS)

    def draft(self, model: str, count: int) -> tuple[int, ...]:
        return (0,) * count


def _numbers(*size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int64, device=META)
