"""Attention handlers, which write new entries to a cache and then attend to it.

`BlockWriter` reads prompts: every prompt of a `PromptCache` advances by t tokens. `StepWriter` decodes: every slot
writes one token at its own length. Both store the newest queries if the method needs them. A decode step writes K and
V only; the evictor fills in the positions later, since new rows are contiguous.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import numpy as np
import torch

from kvbench.engine.attention.flash import flash_attention
from kvbench.engine.attention.interface import AttentionCall, causal_bias
from kvbench.engine.attention.sdpa import newest_rows
from kvbench.engine.cache.dense import DenseCache, DenseStore
from kvbench.engine.cache.paged import PagedCache, PagedStore
from kvbench.engine.cache.pool import PAGE
from kvbench.engine.cache.prompt import PromptCache
from kvbench.engine.cache.prompt_layer import PromptLayer
from kvbench.engine.cache.slot_cache import EvictingStore, RingStore, SlotCache, Store
from kvbench.engine.rules import Rules

# (layer, queries [b, Hq, r, D], their positions [r], number of rows that the last query sees)
Observer = Callable[[PromptLayer, torch.Tensor, torch.Tensor, int], None]
Heard = Callable[[AttentionCall, torch.Tensor], None]  # (a layer's call, its output [b, t, Hq, Dv])


class BlockWriter:
    """Appends t tokens to a prompt's cache and attends causally, `block` queries at a time.

    Args:
        observer: called with each block of queries of a layer that is evicted, once the block's keys are in the cache.
        finished: called with each layer after its attention, when this forward pass will not read the layer again.
        heard: called with every attention call and its output.
        flash: use flash-attn while no earlier row was evicted.
    """

    def __init__(
        self,
        cache: PromptCache,
        block: int,
        observer: Observer | None = None,
        *,
        finished: Callable[[PromptLayer], None] | None = None,
        heard: Heard | None = None,
        flash: bool = False,
    ) -> None:
        self.cache, self.block, self.observer, self.flash = cache, block, observer, flash
        self.finished, self.heard = finished, heard
        self.start, self.positions = 0, torch.empty(0, dtype=torch.int64)
        self._bias: tuple[object, torch.Tensor] | None = None

    def begin(self, start: int, count: int) -> torch.Tensor:
        """Prepare to read `count` tokens from position `start`; return their positions [count]."""
        self.start = start
        self.positions = torch.arange(start, start + count, device=self.cache.device)
        self._bias = None
        return self.positions

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        layer = self.cache.layer(call.layer, call.key)
        call = call.for_heads(layer.geometry.kv_heads)
        before = layer.rows
        layer.append(call.key, call.value, call.query, self.start)
        for name, value in self.cache.rules.columns_of_new_tokens(layer.geometry, call).items():
            layer.columns[name][:, :, before : layer.rows] = value
        self.cache.measure()
        parts = []
        for first in range(0, call.query.shape[2], self.block):
            r = slice(first, first + self.block)
            queries, positions = call.query[:, :, r], self.positions[r]
            rows = before + first + queries.shape[2]
            if self.observer is not None and layer.geometry.evicts:
                self.observer(layer, queries, positions, rows)
            parts.append(self._attend(layer, call, self.start + first, queries, rows))
        if self.finished is not None:
            self.finished(layer)
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if self.heard is not None:
            self.heard(call, out)
        return out

    def _attend(
        self, layer: PromptLayer, call: AttentionCall, start: int, queries: torch.Tensor, rows: int
    ) -> torch.Tensor:
        """Return the attention [b, r, Hq, Dv] of a block of queries, the first at `start`, to the first `rows` rows."""
        keys, values = layer.keys[:, :, :rows], layer.values[:, :, :rows]
        whole = rows == start + queries.shape[2]  # no row was dropped: row j has position j
        gapless = layer.valid is None and (whole or call.window is None)
        if self.flash and gapless and call.sinks is None and keys.shape[-1] == values.shape[-1]:
            return flash_attention(
                queries, keys, values, scaling=call.scaling, softcap=call.softcap, window=call.window
            )
        bias = self._mask(layer, start, queries.shape[2], rows, call)
        return call.attend(queries, keys, values, bias)

    def _mask(self, layer: PromptLayer, start: int, count: int, rows: int, call: AttentionCall) -> torch.Tensor | None:
        """Return the mask of `_attend`: additive [b or 1, Hk or 1, count, rows], or None where every row is seen.

        Layers with equal rows and window share it.
        """
        if call.query.is_cuda and call.plain and call.window is None and layer.valid is None:
            return newest_rows(count, rows)
        first = start - self.start
        positions = self.positions[first : first + count]
        if layer.valid is not None:
            seen = layer.positions[:, :, :rows]
            return causal_bias(positions, seen, call.window, call.query.dtype, layer.valid[:, :, :rows])
        # If all heads hold equally many rows, every earlier row is older than the block, so the mask needs no true
        # positions, except for a sliding window.
        key = (start, count, rows, call.window)
        if self._bias is None or self._bias[0] != key:
            if call.window is None:
                seen = torch.arange(rows, device=positions.device) + (start + count - rows)
            else:
                seen = layer.positions[0, 0, :rows]
            self._bias = (key, causal_bias(positions, seen, call.window, call.query.dtype)[None, None])
        return self._bias[1]


FIXED_ROWS = 1024  # caches of up to this many rows are always read whole
LENGTH_STEP = 64  # rows; in longer caches each slot is read up to its own length, rounded up to a multiple of this


class StepWriter(ABC):
    """Appends one token to every slot and attends to all its live rows.

    The number of rows read changes the last bits of the result, so it never depends on other slots. A step reads all
    rows of a slot where a budget bounds them or the cache is small, else as many as the slot's own length requires.
    """

    def __init__(self, cache: SlotCache, rules: Rules) -> None:
        self.cache, self.rules = cache, rules.decoding()
        self.fixed = cache.shape.bounded or cache.shape.rows <= FIXED_ROWS
        self.positions = torch.empty(0, dtype=torch.int64)
        self._keep_queries = False
        self._ring_bias: dict[int, torch.Tensor] = {}

    def begin(self, keep_queries: bool) -> torch.Tensor:
        """Prepare one step; return the positions [S] of the new tokens. The caller then calls `SlotCache.advance`."""
        self._keep_queries = keep_queries
        self._ring_bias.clear()
        self.positions = torch.tensor(self.cache.seen, device=self.cache.device)
        self.prepare()
        return self.positions

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        layer = self.cache.layers[call.layer]
        call = call.for_heads(layer.geometry.kv_heads)
        if self._keep_queries and layer.queries.shape[2]:
            layer.keep_queries(call.query, self.positions)
        return self.in_ring(layer, call) if isinstance(layer, RingStore) else self.attend(layer, call)

    @abstractmethod
    def prepare(self) -> None:
        """Compute what all layers of one step share."""

    @abstractmethod
    def attend(self, layer: EvictingStore, call: AttentionCall) -> torch.Tensor:
        """Write the new entries of a layer that is evicted, and attend; return [S, 1, Hq, Dv]."""

    def write_columns(
        self, columns: Mapping[str, torch.Tensor], at: torch.Tensor, layer: Store, call: AttentionCall
    ) -> None:
        """Write the columns of the new entries (`Rules.columns_of_new_tokens`) at flat rows `at` [S * Hk]."""
        for name, value in self.rules.columns_of_new_tokens(layer.geometry, call).items():
            columns[name].view(-1).index_copy_(0, at, value.reshape(-1))

    def in_ring(self, layer: RingStore, call: AttentionCall) -> torch.Tensor:
        rows, heads = layer.capacity, layer.geometry.kv_heads
        base = torch.arange(self.cache.slots * heads, device=self.positions.device).view(-1, heads) * rows
        write_rows(layer.keys, layer.values, (base + (self.positions % rows)[:, None]).view(-1), call)
        if rows not in self._ring_bias:
            live = (self.positions + 1).clamp(max=rows)[:, None, None]
            self._ring_bias[rows] = live_bias(live, rows, call.query.dtype)
        bias = self._ring_bias[rows]
        if self.fixed or rows <= FIXED_ROWS:
            return call.attend(call.query, layer.keys, layer.values, bias)
        return self.slot_by_slot(call, layer.keys, layer.values, bias)

    def slot_by_slot(
        self, call: AttentionCall, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        """Attend slot by slot, each up to its own length rounded up to a multiple of LENGTH_STEP."""
        parts = []
        for slot, seen in enumerate(self.cache.seen):
            n = min(-(-(seen + 1) // LENGTH_STEP) * LENGTH_STEP, keys.shape[2])
            s = slice(slot, slot + 1)
            parts.append(call.attend(call.query[s], keys[s, :, :n], values[s, :, :n], bias[s, ..., :n]))
        return torch.cat(parts)


class DenseStepWriter(StepWriter):
    cache: DenseCache

    def prepare(self) -> None:
        self._lengths = torch.tensor(self.cache.lengths, device=self.cache.device)
        self._at: dict[int, torch.Tensor] = {}
        self._bias: torch.Tensor | None = None

    def attend(self, layer: EvictingStore, call: AttentionCall) -> torch.Tensor:
        assert isinstance(layer, DenseStore)
        heads, rows = layer.geometry.kv_heads, layer.capacity
        if heads not in self._at:
            base = torch.arange(self.cache.slots * heads, device=self._lengths.device).view(-1, heads) * rows
            self._at[heads] = (base + self._lengths[:, None]).view(-1)
        write_rows(layer.keys, layer.values, self._at[heads], call)
        self.write_columns(layer.columns, self._at[heads], layer, call)
        if self._bias is None:
            self._bias = live_bias(self._lengths[:, None, None] + 1, rows, call.query.dtype)
        if self.fixed:
            return call.attend(call.query, layer.keys, layer.values, self._bias)
        return self.slot_by_slot(call, layer.keys, layer.values, self._bias)


class PagedStepWriter(StepWriter):
    """A step writer for `PagedCache`: it copies each head's rows together through its block table, then attends."""

    cache: PagedCache

    def prepare(self) -> None:
        self.cache.make_room()
        stores = [store for stack in self.cache.stacks for store in stack.layers]
        self._tables = {s.geometry.index: s.table() for s in stores}
        self._lengths = {s.geometry.index: s.lengths() for s in stores}
        self._sizes: dict[int, list[int]] = {}
        for stack in self.cache.stacks:
            sizes = self._buckets(stack.blocks.lengths.max(axis=1) + 1).reshape(-1, stack.slots).tolist()
            self._sizes |= {store.geometry.index: size for store, size in zip(stack.layers, sizes)}

    def attend(self, layer: EvictingStore, call: AttentionCall) -> torch.Tensor:
        assert isinstance(layer, PagedStore)
        table, lengths = self._tables[call.layer], self._lengths[call.layer]  # [S, Hk, W], [S, Hk] int32
        page = table.gather(-1, (lengths // PAGE).long()[..., None])[..., 0]
        at = (page * PAGE + lengths % PAGE).view(-1).long()
        write_rows(layer.pool.keys, layer.pool.values, at, call)
        self.write_columns(layer.pool.columns, at, layer, call)
        sizes = self._sizes[call.layer]
        live = {sizes[s] for s in range(self.cache.slots) if self.cache.seen[s]} or {sizes[0]}
        out: torch.Tensor | None = None
        for rows in sorted(live):  # each pass computes all slots: a fixed shape keeps every slot's bits
            part = self._read(layer, call, table, lengths, rows)
            if out is None:
                out = part
            else:
                mine = torch.tensor([size == rows for size in sizes], device=part.device)
                out = torch.where(mine[:, None, None, None], part, out)
        assert out is not None
        return out

    def _read(
        self, layer: PagedStore, call: AttentionCall, table: torch.Tensor, lengths: torch.Tensor, rows: int
    ) -> torch.Tensor:
        slots, heads = lengths.shape
        row = torch.arange(rows, device=table.device)
        pages = table[:, :, (row // PAGE).clamp(max=table.shape[2] - 1)]  # the mask below hides rows beyond the table
        at = (pages * PAGE + row % PAGE).view(-1)
        keys = layer.pool.keys.index_select(0, at).view(slots, heads, rows, -1)
        values = layer.pool.values.index_select(0, at).view(slots, heads, rows, -1)
        # Idle slots and slots of another size must see at least one row: a softmax over none is NaN.
        seen = torch.minimum(lengths + 1, torch.full_like(lengths, rows))
        return call.attend(call.query, keys, values, live_bias(seen[..., None], rows, call.query.dtype))

    def _buckets(self, rows: np.ndarray) -> np.ndarray:
        """Return how many rows to read where the longest head has `rows`: a base size, doubled until it fits."""
        sizes = np.full_like(rows, self.cache.shape.rows if self.fixed else FIXED_ROWS)
        while (small := sizes < rows).any():
            sizes[small] *= 2
        return sizes


def step_writer(cache: SlotCache, rules: Rules) -> StepWriter:
    return DenseStepWriter(cache, rules) if isinstance(cache, DenseCache) else PagedStepWriter(cache, rules)


def write_rows(keys: torch.Tensor, values: torch.Tensor, at: torch.Tensor, call: AttentionCall) -> None:
    """Write the new entry of every slot and head at flat rows `at` [S * Hk]."""
    keys.view(-1, keys.shape[-1]).index_copy_(0, at, call.key.reshape(at.numel(), -1))
    values.view(-1, values.shape[-1]).index_copy_(0, at, call.value.reshape(at.numel(), -1))


def live_bias(live: torch.Tensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the additive mask [S, Hk or 1, 1, rows] that shows the first `live` [S, Hk or 1, 1] rows."""
    hidden = torch.arange(rows, device=live.device) >= live
    bias = torch.zeros(hidden.shape, dtype=dtype, device=live.device).masked_fill_(hidden, float("-inf"))
    return bias[:, :, None]
