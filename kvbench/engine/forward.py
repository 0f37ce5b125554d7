"""The two attention handlers that write to a SlotCache and read from it: a block of new tokens, or one token a slot.

`BlockWriter` serves reading prompts: all slots advance in lockstep by t tokens. `StepWriter` serves decoding: every
slot writes one token at its own length. Both keep the newest queries where the method asked for them. Positions of
new entries are filled in by the evictor (new rows are contiguous), so a decode step writes K and V only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvbench.engine.attention import AttentionCall, causal_bias, grouped_attention
from kvbench.engine.cache import LayerStore, SlotCache

Observer = Callable[[int, torch.Tensor, int, int], None]  # (layer, queries [b, Hq, t, D], first position, live rows)


class BlockWriter:
    """Appends t tokens to every slot of a cache without rings (a prompt being read) and attends causally.

    `observer` sees each layer's queries of the block right after its keys are in the cache.
    """

    def __init__(self, cache: SlotCache, observer: Observer | None = None) -> None:
        self.cache, self.observer = cache, observer
        self._bias: dict[int | None, torch.Tensor] = {}
        self.start, self.count = 0, 0

    def begin(self, start: int, count: int) -> torch.Tensor:
        """Announce a block of `count` tokens from position `start`; returns its positions [count]."""
        self.start, self.count = start, count
        self._bias.clear()
        return torch.arange(start, start + count, device=self.cache.device)

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        layer = self.cache.layers[call.layer]
        start, end = self.start, self.start + self.count
        layer.keys[:, :, start:end] = call.key
        layer.values[:, :, start:end] = call.value
        if layer.positions is not None:
            layer.positions[:, :, start:end] = torch.arange(start, end, device=call.query.device, dtype=torch.int32)
        if layer.queries is not None:
            keep = min(self.count, self.cache.query_rows)
            at = torch.arange(end - keep, end, device=call.query.device) % self.cache.query_rows
            layer.queries[:, :, at] = call.query[:, :, -keep:]
        if self.observer is not None and layer.geometry.evicts:
            self.observer(call.layer, call.query, start, end)
        return grouped_attention(
            call.query,
            layer.keys[:, :, :end],
            layer.values[:, :, :end],
            self._mask(call, end),
            scaling=call.scaling,
            softcap=call.softcap,
            sinks=call.sinks,
        )

    def _mask(self, call: AttentionCall, rows: int) -> torch.Tensor:
        if call.window not in self._bias:
            device = call.query.device
            query_positions = torch.arange(self.start, self.start + self.count, device=device)
            bias = causal_bias(query_positions, torch.arange(rows, device=device), call.window, call.query.dtype)
            self._bias[call.window] = bias[None, None]
        return self._bias[call.window]


FIXED_ROWS = 1024  # caches up to this many rows are always read whole
LENGTH_STEP = 64  # rows; a longer cache is read slot by slot, up to the slot's own length in steps of this


class StepWriter:
    """Appends one token to every slot at the slot's own length and attends to all its live rows.

    How many rows are read never depends on other slots, because it changes the last bits of the result: all rows
    where a budget bounds them or they are few, else the slot's own length.
    """

    def __init__(self, cache: SlotCache) -> None:
        self.cache = cache
        self._rows: dict[tuple[int, int], torch.Tensor] = {}
        self._bias: dict[int | None, torch.Tensor] = {}
        self._keep_queries = False

    def begin(self, keep_queries: bool) -> torch.Tensor:
        """Prepare one step; returns the absolute positions [S] of the new tokens.

        Lengths are advanced by the caller.
        """
        cache, device = self.cache, self.cache.device
        self._rows.clear()
        self._bias.clear()
        self._keep_queries = keep_queries and cache.query_rows > 0
        self.lengths = torch.tensor(cache.lengths, device=device)
        self.positions = torch.tensor(cache.seen, device=device)
        return self.positions

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        layer = self.cache.layers[call.layer]
        slots = self.cache.slots
        at = self._row_index(layer)
        layer.keys.view(-1, layer.geometry.head_dim).index_copy_(0, at, call.key.reshape(at.numel(), -1))
        layer.values.view(-1, layer.geometry.value_dim).index_copy_(0, at, call.value.reshape(at.numel(), -1))
        if self._keep_queries and layer.queries is not None:
            heads, width = layer.geometry.query_heads, self.cache.query_rows
            ring = (torch.arange(slots * heads, device=at.device) * width).view(slots, heads)
            ring = (ring + (self.positions % width)[:, None]).view(-1)
            layer.queries.view(-1, layer.geometry.head_dim).index_copy_(0, ring, call.query.reshape(slots * heads, -1))
        bias = self._mask(layer, call.query.dtype)
        if self.cache.bounded or layer.capacity <= FIXED_ROWS:
            return self._attend(call, layer, slice(None), layer.capacity, bias)
        steps = [-(-(n + 1) // LENGTH_STEP) * LENGTH_STEP for n in self.cache.lengths]
        parts = [self._attend(call, layer, slice(s, s + 1), min(n, layer.capacity), bias) for s, n in enumerate(steps)]
        return torch.cat(parts)

    def _attend(
        self, call: AttentionCall, layer: LayerStore, slots: slice, rows: int, bias: torch.Tensor
    ) -> torch.Tensor:
        return grouped_attention(
            call.query[slots],
            layer.keys[slots, :, :rows],
            layer.values[slots, :, :rows],
            bias[slots, ..., :rows],
            scaling=call.scaling,
            softcap=call.softcap,
            sinks=call.sinks,
        )

    def _row_index(self, layer: LayerStore) -> torch.Tensor:
        """[S * Hk] flat row of each head's new entry; the same for all layers of one shape."""
        heads = layer.geometry.kv_heads
        key = (heads, layer.capacity if layer.ring is None else -layer.ring)
        if key not in self._rows:
            at = self.lengths if layer.ring is None else self.positions % layer.ring
            base = torch.arange(self.cache.slots * heads, device=at.device).view(-1, heads) * layer.capacity
            self._rows[key] = (base + at[:, None]).view(-1)
        return self._rows[key]

    def _mask(self, layer: LayerStore, dtype: torch.dtype) -> torch.Tensor:
        """[S, 1, 1, capacity] additive mask over live rows."""
        if layer.ring not in self._bias:
            live = self.lengths + 1 if layer.ring is None else (self.positions + 1).clamp(max=layer.ring)
            hidden = torch.arange(layer.capacity, device=live.device)[None] >= live[:, None]
            bias = torch.zeros(hidden.shape, dtype=dtype, device=live.device).masked_fill_(hidden, float("-inf"))
            self._bias[layer.ring] = bias[:, None, None]
        return self._bias[layer.ring]
