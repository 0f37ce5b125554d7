"""Counts, before a run, the bytes that a method's code takes beside the cache.

The code runs on the meta device, on views of the sizes that it will get in the run. docs/engine.md (The memory plan)
says what the count assumes about copies of entries and about uneven heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvbench.engine.attention.geometry import LayerGeometry
from kvbench.engine.attention.grouped import causal_bias, grouped_attention
from kvbench.engine.attention.indexer import scores_bytes
from kvbench.engine.cache.slot_cache import Shape
from kvbench.engine.cache.stack import alike
from kvbench.engine.cache.stack import at_once as rows_at_once
from kvbench.engine.meta import META, Answers, MetaBytes
from kvbench.engine.meta_views import MetaViews, Shown
from kvbench.engine.probe_sizes import ProbeSizes, probe_sizes
from kvbench.eviction import select
from kvbench.eviction.api import Method
from kvbench.eviction.checks import unread
from kvbench.eviction.planned_device import planned_for
from kvbench.eviction.view import LayerView

COUNTED = (1, 4, 16, 64)  # numbers of slots for which bytes are counted; between them, bytes grow about linearly
INDEX = 8  # bytes of an index
MOST_READS = 10_000  # values that a method's code may read in one call; more mean an endless loop
GUESS = 3  # code that fails on meta tensors counts as this many float32 copies of the keys that it sees

TickBytes = tuple[int, int, int]  # see `Scratch._ticking`


@dataclass(frozen=True, slots=True)
class Ticks:
    """Scratch bytes of evictions while decoding.

    sizes: pairs (number of slots, bytes) in ascending order; the first pair is for one slot. most: the most slots that
    one view, or the views of one joint decision, can show; further slots follow in later views and add no bytes.
    """

    sizes: tuple[tuple[int, int], ...]
    most: int

    def at(self, slots: int) -> int:
        """Return the scratch bytes of evictions with this many slots.

        They are interpolated linearly between two pairs of `sizes`. Beyond the last pair the line of the last two pairs
        goes on, up to `most` slots; more slots add no bytes.
        """
        together, (before, after) = min(slots, self.most), (self.sizes[0], self.sizes[-1])
        for pair in itertools.pairwise(self.sizes):
            before, after = pair
            if together <= after[0]:
                break
        slope = (after[1] - before[1]) / max(1, after[0] - before[0])
        return round(before[1] + (together - before[0]) * slope)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scratch:
    """Counts the bytes that the code of one method takes on one model.

    gpu: whether the method will run on a GPU. counted: earlier counts for evictions while decoding on this model. The
    key of a count holds all that the count depends on, so several cells may share a count.
    """

    meta: MetaViews
    gpu: bool
    counted: dict[Any, TickBytes] = field(default_factory=dict)

    @property
    def method(self) -> Method:
        return self.meta.method

    @property
    def observes(self) -> bool:
        """Whether the method observes the queries of a prompt while the prompt is read."""
        return self.method.during("prefill").evicts and self.method.needs().queries == "since_last"

    def weights(self) -> int:
        """Return the bytes of the method's weights; 0 for weights of unknown shapes."""
        return sum(weight.nbytes for weight in self.meta.weights(self.method).values())

    def new_tokens(self, t: int) -> int:
        """Return the bytes that the method takes to compute the columns of t new tokens of one sequence."""
        if not (self.method.evicts and self.method.reads_tokens):
            return 0
        try:
            with self._counting(t) as live:
                tokens = self.meta.tokens(t)
                given = live.now
                self.method.on_tokens(tokens)
            return live.peak - given
        except Exception:  # see `_acting`
            return self._guess(t)

    def attended(self, g: LayerGeometry, t: int, n: int, uneven: bool) -> int:
        """Return the bytes that one layer's attention of t queries over n entries per head takes, its mask included.
        uneven: whether heads hold different numbers of entries, so that each needs a mask of its own."""
        floats, dtype = self.meta.floats, self.meta.dtype
        with self._counting(n) as live:
            query, keys = floats(1, g.query_heads, t, g.head_dim), floats(1, g.kv_heads, n, g.head_dim)
            values, sinks = floats(1, g.kv_heads, n, g.read_dim), floats(g.query_heads) if g.sinks else None
            positions = torch.empty((1, g.kv_heads, n) if uneven else (1, 1, n), dtype=torch.int64, device=META)
            given = live.now
            if self.gpu and g.causal and not uneven:
                bias = None  # the mask of `sdpa.newest_rows` stores no elements
            else:
                valid = torch.ones_like(positions, dtype=torch.bool) if uneven else None
                bias = causal_bias(torch.empty(t, device=META, dtype=torch.int64), positions, g.window, dtype, valid)
            grouped_attention(query, keys, values, bias, scaling=g.scaling, softcap=g.softcap, sinks=sinks)
        return live.peak - given + (scores_bytes(g.indexer_heads, g.value_dim, t, n) if 0 < g.topk < n else 0)

    def observed(self, rows: int, block: int) -> int:
        """Return the bytes that the method takes to observe a prompt's queries, `block` at a time. rows: entries per
        head of the prompt."""
        if not self.observes:
            return 0
        full = min(block, rows)  # queries of the last full block
        return self._observing(self.method, Shown(1, rows - rows % full, full))

    def probes(self, rows: int) -> ProbeSizes:
        """Return the sizes of the probes over a prompt of `rows` tokens; all 0 if no probe will run."""
        acting = self.method.during("prefill")
        if not acting.evicts or not acting.needs().probes or not acting.trigger(1).full(rows, self.meta.budget):
            return ProbeSizes()
        return probe_sizes(acting, self.meta.weights(self.method), rows, self.meta.budget)

    def probed(self, rows: int, block: int, length: int) -> int:
        """Return the bytes that the method takes to observe a probe of `length` tokens, `block` queries at a time.
        rows: entries per head of the prompt."""
        return self._observing(self.method, Shown(1, rows, min(block, length), probe=length))

    def decided(self, rows: int, acting: Method | None = None) -> int:
        """Return the bytes that the method takes to evict a prompt with `rows` entries per head. acting: a method that
        evicts a copy of the cache for a probe (`Probe.against`); None: the method itself."""
        method = acting or self.method.during("prefill")
        if not method.evicts or not method.trigger(1).full(rows, self.meta.budget):
            return 0
        needs, views = method.needs(), 1 if method.layerwise and acting is None else len(self.meta.geometry)
        return self._deciding(method, Shown(1, rows, needs.width, min(rows, needs.prompt_hidden), views))[0]

    def of_ticks(self, held: Shape, at_once: int) -> Ticks:
        """Return the scratch bytes that evictions take while decoding, counted for some numbers of slots (`COUNTED`); 0
        if the method evicts nothing then. held: the size of a cache with one slot. at_once: the most bytes of scratch
        that one view may take."""
        acting = self.method.during("decode")
        if not acting.evicts or acting.trigger(self.meta.interval).growth is None:
            return Ticks(((1, 0),), 1)
        # Of the views to observe and to decide, those with fewer queries show more rows.
        queries = 0 if held.sums else acting.needs().width
        layers, rows = len(self.meta.geometry), self._rows_at_once(acting, held, queries, at_once)
        most = rows if acting.layerwise else max(1, rows // layers)
        if acting.layerwise and acting.stacked:
            most = -(-rows // layers)
        counted = sorted({min(most, slots) for slots in COUNTED})
        return Ticks(tuple((slots, self._tick(acting, held, slots, at_once)) for slots in counted), most)

    def _tick(self, acting: Method, held: Shape, slots: int, at_once: int) -> int:
        """Return the scratch bytes that an eviction of `slots` slots takes at one tick."""
        needs, layers = acting.needs(), len(self.meta.geometry)
        width = needs.window if held.marks else needs.width
        rows = slots * layers if acting.stacked else slots  # rows of one view, without a bound
        shown = Shown(
            min(rows, self._rows_at_once(acting, held, width, at_once)),
            self._entries(held),
            width,
            needs.hidden,
            marks=held.marks,
            stacked=acting.stacked,
            copied=True,
        )
        seen = None
        if needs.queries == "since_last":
            queries = 0 if held.sums else held.queries
            b = min(rows, self._rows_at_once(acting, held, queries, at_once))
            seen = replace(shown, b=b, queries=queries, sums=held.sums, marks=())
        if not acting.layerwise:
            if acting.stacked and shown.b >= layers and len(list(alike(self.meta.geometry))) == 1:
                shown = replace(shown, b=slots * layers, together=layers)
            else:
                shown = replace(shown, b=slots, views=layers, together=int(acting.stacked))
        observed, decided, views = self._ticking(acting, seen, shown)
        return max(observed, decided, views + shown.b * self._compacting(held))

    def _ticking(self, acting: Method, seen: Shown | None, shown: Shown) -> TickBytes:
        """Return three numbers of bytes: to observe a view, to decide about views, and for copies of entries.

        The third number is a part of the second: the views of a decision copy entries. seen: the sizes of the observed
        view; None: nothing is observed. shown: the sizes of the views of the decision.
        """
        depends: object = (self.meta, self.gpu, acting, seen, shown)
        try:
            if depends in self.counted:
                return self.counted[depends]
        except TypeError:  # a plug-in's method may have options that cannot be hashed
            depends = object()
        observed = 0 if seen is None else self._observing(acting, seen)
        self.counted[depends] = observed, *self._deciding(acting, shown)
        return self.counted[depends]

    def _entries(self, held: Shape) -> int:
        """Return how many entries per head a view shows while decoding."""
        return held.rows if self.method.uniform or held.bounded else held.longest

    def _rows_at_once(self, acting: Method, held: Shape, queries: int, at_once: int) -> int:
        return rows_at_once(
            *(self.meta.geometry[0], acting.needs(), at_once),
            entries=self._entries(held),
            queries=queries,
            element=self.meta.dtype.itemsize,
            kernels=self.meta.kernels,
        )

    def _compacting(self, held: Shape) -> int:
        """Return the bytes that an eviction takes to close the gaps in one layer of one slot.

        Each KV head takes a copy of the moved keys or of the moved values, whichever are larger: the cache moves first
        keys, then values. Each KV head also takes four indices per moved entry and three indices per entry
        (`stack.moves`).
        """
        g, moved = self.meta.geometry[0], max(0, held.rows - self.meta.budget)
        entry = max(g.head_dim, g.value_dim) * self.meta.dtype.itemsize
        return g.kv_heads * (moved * (entry + 4 * INDEX) + 3 * INDEX * held.rows)

    def _deciding(self, acting: Method, shown: Shown) -> tuple[int, int]:
        """Return the two numbers of `_acting` while the method `acting` chooses the entries to evict."""
        return self._acting(acting, shown, lambda views: select.decide(acting, views))

    def _observing(self, acting: Method, shown: Shown) -> int:
        """Return the most bytes that `acting` takes to observe a view of these sizes."""
        return self._acting(acting, shown, lambda views: acting.observe(views[0]))[0]

    def _acting(self, acting: Method, shown: Shown, act: Callable[[Sequence[LayerView]], Any]) -> tuple[int, int]:
        """Return two numbers: the most bytes in use while `act` runs on views of the sizes in `shown`, and how many of
        these bytes are the views' copies of entries (0 if views show the cache's own memory)."""
        made = 0
        try:
            rules = self.meta.rules(acting)
            with self._counting(shown.entries) as live:
                views = self.meta.views(rules, shown)
                made = live.now
                act(views)
            most = live.peak
        except Exception:  # a plug-in's code may need values, or compute outside torch
            most = made + self._guess(shown.b * shown.views * shown.entries)
        given = 0 if shown.copied else made
        return most - given, made - given

    @contextmanager
    def _counting(self, number: int) -> Iterator[MetaBytes]:
        """Count the bytes of tensors created in the `with` block, with kernels and block sizes of the planned device.
        number: the value that code in the `with` block gets whenever it reads an integer from a meta tensor."""
        answers = Answers(number=number)
        with torch.inference_mode(), unread(), planned_for(gpu=self.gpu), MetaBytes(answers, MOST_READS) as live:
            yield live

    def _guess(self, entries: int) -> int:
        return GUESS * 4 * entries * max(g.kv_heads * g.head_dim for g in self.meta.geometry)
