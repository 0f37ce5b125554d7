"""Attention handlers of a decode step: each slot gets one new entry per head, and its query attends to all entries.

A cache row is the place of one entry of a head. A step writes K and V of the new entries, and their columns if the
method computes them from new tokens; it stores queries and hidden states if the method needs them. The evictor writes
the positions later, since they follow from the order of the entries.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch

from kvbench.engine.attention.grouped import live_bias
from kvbench.engine.attention.interface import AttentionCall
from kvbench.engine.cache.dense import DenseCache, DenseStore
from kvbench.engine.cache.paged import PagedCache, PagedStore
from kvbench.engine.cache.pool import PAGE
from kvbench.engine.cache.slot_cache import EvictingStore, RingStore, RowPlaces, SlotCache
from kvbench.engine.kernels.backends import Decode, splits
from kvbench.engine.kernels.masked import write
from kvbench.engine.replicas import Replicas
from kvbench.engine.rules import Rules
from kvbench.engine.upload import upload

FIXED_ROWS = 1024  # a step reads all rows of caches with at most this many cache rows per head
# In longer caches without a bound, a step reads a slot's length, rounded up to a multiple of this.
LENGTH_STEP = 64


class Entries(NamedTuple):
    """A layer's entries as arguments of `backends.Decode`."""

    keys: torch.Tensor
    values: torch.Tensor
    lengths: torch.Tensor  # [S, Hk or 1]
    table: torch.Tensor | None = None
    sums: torch.Tensor | None = None


class StepWriter(ABC):
    """Appends one token to every slot and attends to all entries of that slot.

    Its own tensors are never reallocated: `load` copies the slots' lengths from the host before a block of steps, and
    every step increases them on the device. `decode`: a backend of `kernels`; None: `AttentionCall.attend`.
    `capturable`: whether a step depends on tensors alone. `version` changes when a tensor of the cache was replaced.

    In `AttentionCall.attend` the last bits of the result depend on the number of cache rows read, so this number must
    not depend on other slots. A step reads all cache rows of a slot if a budget bounds the slot's length or the cache
    is small, otherwise only as many as the slot's own length requires.
    """

    def __init__(self, cache: SlotCache, rules: Rules, decode: Decode | None = None) -> None:
        self.cache, self.rules, self.decode = cache, rules.decoding(), decode
        self._evicts = self.rules.method.trigger(rules.interval).growth is not None
        self.version, self.capturable = 0, decode is not None
        self._layers = {index: layer for layer in cache.layers for index in layer.geometry.attending}
        self.fixed = cache.shape.bounded or cache.shape.rows <= FIXED_ROWS
        self.positions = self.live = Replicas(torch.zeros(cache.slots, dtype=torch.int64, device=cache.device))
        self._keep_newest, self._newest = False, RowPlaces(self.positions, rings=True)
        self._steps = 0  # steps of this block so far

    def load(self, ahead: Sequence[int], keep_newest: bool) -> None:
        """Prepare a block of steps. ahead: for each slot, the most tokens that the block adds; keep_newest: whether to
        store the queries and hidden states of these tokens."""
        self._steps, self._keep_newest = 0, keep_newest
        self.cache.make_room(ahead)
        self.load_lengths()

    def begin(self, positions: torch.Tensor, live: torch.Tensor) -> None:
        """Begin a step. positions: [S], of the tokens that the step reads; live: [S] int64, 1 for a live sequence."""
        self.positions, self.live = Replicas(positions), Replicas(live)
        self._newest = RowPlaces(self.positions, rings=True)
        self.prepare()

    def advance(self) -> None:
        """End the step: it has added a token to every live slot."""
        self._steps += 1
        self.add()

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        layer = self._layers[call.layer]
        call = layer.geometry.adapt(call)
        if self._keep_newest and call.stores:
            layer.keep_newest(call.query, call.hidden, self._newest)
        if self.decode is not None:
            with on_device(layer.geometry.device):
                return self._decode(self.decode, layer, call)
        return self.in_rows(layer, call, self._newest) if isinstance(layer, RingStore) else self.attend(layer, call)

    def _decode(self, decode: Decode, layer: RingStore | EvictingStore, call: AttentionCall) -> torch.Tensor:
        where = call.query.device
        if isinstance(layer, RingStore):
            rows, entries = layer.capacity, Entries(layer.keys, layer.values, self.positions.on(where)[:, None])
        else:
            rows, entries = self.cache.shape.rows, self.entries(layer)
        if layer.geometry.topk:  # triton's kernel for latents writes no index keys
            rows_of_head = rows if entries.table is None else entries.table.shape[2] * PAGE
            live = self.live.on(where)
            write(entries.values, call.value[:, :, 0], entries.lengths, live, rows_of_head, entries.table)
        # The function always writes the new entries. If the call stores nothing, it writes the same ones once more.
        out = decode(
            *(call.query[:, :, 0], call.key[:, :, 0], call.value[:, :, 0]),
            *(entries.keys, entries.values, entries.lengths, self.live.on(where)),
            scaling=call.scaling,
            splits=splits(rows, self.cache.slots * layer.geometry.kv_heads),
            table=entries.table,
            sums=entries.sums if call.stores else None,
            softcap=call.softcap,
            sinks=call.sinks,
            latent=layer.geometry.latent,
        )
        if isinstance(layer, EvictingStore) and call.stores:
            self.write_columns(layer, call)
        return out[:, None]

    @abstractmethod
    def load_lengths(self) -> None:
        """Copy the lengths of all slots from the host to the device."""

    @abstractmethod
    def add(self) -> None:
        """Count the new entry of every live slot (`live` is 1) in the lengths on the device."""

    @abstractmethod
    def prepare(self) -> None:
        """Begin a step: discard the tensors that the layers shared in the previous step, such as masks."""

    @abstractmethod
    def attend(self, layer: EvictingStore, call: AttentionCall) -> torch.Tensor:
        """Write the new entries to an evicted layer, and return the attention [S, 1, Hq, Dv]."""

    @abstractmethod
    def entries(self, layer: EvictingStore) -> Entries:
        """Return the layer's entries as arguments of a backend."""

    @abstractmethod
    def new_rows(self, layer: EvictingStore) -> torch.Tensor:
        """Return the indices [S * Hk] of the new entries in the layer's keys and values, flattened to [-1, D]."""

    @abstractmethod
    def columns(self, layer: EvictingStore) -> Mapping[str, torch.Tensor]:
        """Return the tensors with the layer's columns, by name; in the paged layout, layers share these tensors."""

    def write_columns(self, layer: EvictingStore, call: AttentionCall) -> None:
        """Write the columns of the new entries (`Rules.columns_of_new_tokens`), if an eviction may read them."""
        if not self._evicts:
            return
        for name, value in self.rules.columns_of_new_tokens(layer.geometry, call).items():
            self.columns(layer)[name].view(-1).index_copy_(0, self.new_rows(layer), value.reshape(-1))

    def in_rows(self, layer: DenseStore | RingStore, call: AttentionCall, places: RowPlaces) -> torch.Tensor:
        """Write the new entries, if the call stores them, to the layer's rows at `places`; return the attention
        [S, 1, Hq, Dv]."""
        if call.stores:
            write_rows(layer.keys, layer.values, places.of(layer.keys), call)
            if isinstance(layer, DenseStore):
                self.write_columns(layer, call)
        bias, sums = places.bias(layer.keys, call.query.dtype), layer.sums if call.stores else None
        if self.fixed or layer.capacity <= FIXED_ROWS:
            return call.attend(call.query, layer.keys, layer.values, bias, sums)
        return self.slot_by_slot(call, layer, bias, sums)

    def slot_by_slot(
        self, call: AttentionCall, layer: DenseStore | RingStore, bias: torch.Tensor, sums: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute the attention of one slot after the other. For each slot, read only as many cache rows as its
        sequence has tokens, rounded up to a multiple of LENGTH_STEP. sums: see `grouped_attention`."""
        parts = []
        for slot, seen in enumerate(self.cache.seen):
            n = min(-(-(seen + self._steps + 1) // LENGTH_STEP) * LENGTH_STEP, layer.keys.shape[2])
            s = slice(slot, slot + 1)
            keys, values = layer.keys[s, :, :n], layer.values[s, :, :n]
            mine = None if sums is None else sums[s, ..., :n]
            asked = call.part(rows=s)
            parts.append(asked.attend(asked.query, keys, values, bias[s, ..., :n], mine))
        return torch.cat(parts)


class DenseStepWriter(StepWriter):
    cache: DenseCache

    def __init__(self, cache: DenseCache, rules: Rules, decode: Decode | None = None) -> None:
        super().__init__(cache, rules, decode)
        self._lengths = torch.zeros(cache.slots, dtype=torch.int64, device=cache.device)
        self.capturable |= self.fixed

    def load_lengths(self) -> None:
        self._lengths.copy_(upload(np.array(self.cache.lengths), self.cache.device))

    def add(self) -> None:
        self._lengths += self.live.on(self._lengths.device)

    def prepare(self) -> None:
        self._held = Replicas(self._lengths)
        self._rows = RowPlaces(self._held, rings=False)

    def entries(self, layer: EvictingStore) -> Entries:
        assert isinstance(layer, DenseStore)
        return Entries(layer.keys, layer.values, self._held.on(layer.keys.device)[:, None], sums=layer.sums)

    def columns(self, layer: EvictingStore) -> Mapping[str, torch.Tensor]:
        assert isinstance(layer, DenseStore)
        return layer.columns

    def new_rows(self, layer: EvictingStore) -> torch.Tensor:
        return self._rows.of(layer.keys)

    def attend(self, layer: EvictingStore, call: AttentionCall) -> torch.Tensor:
        assert isinstance(layer, DenseStore)
        return self.in_rows(layer, call, self._rows)


class PagedStepWriter(StepWriter):
    """A step writer for `PagedCache`. Without a backend, it copies each head's entries from their pages before it
    attends to them."""

    cache: PagedCache

    def __init__(self, cache: PagedCache, rules: Rules, decode: Decode | None = None) -> None:
        super().__init__(cache, rules, decode)
        self._stack_lengths = [
            torch.zeros(stack.blocks.lengths.shape, dtype=torch.int32, device=stack.device) for stack in cache.stacks
        ]
        self._lengths = {  # [S, Hk] int32 by layer
            store.geometry.index: lengths[store.rows]
            for stack, lengths in zip(cache.stacks, self._stack_lengths)
            for store in stack.layers
        }
        self._tables: dict[int, torch.Tensor] = {}
        self._sizes: dict[int, list[int]] = {}

    def load_lengths(self) -> None:
        for stack, lengths in zip(self.cache.stacks, self._stack_lengths):
            lengths.copy_(stack.blocks.lengths_on_device())
        tables = {store.geometry.index: store.table() for stack in self.cache.stacks for store in stack.layers}
        if any(was.data_ptr() != tables[index].data_ptr() for index, was in self._tables.items()):
            self.version += 1  # a table grew and was reallocated
        self._tables = tables

    def add(self) -> None:
        for lengths in self._stack_lengths:
            lengths.view(-1, self.cache.slots, lengths.shape[1]).add_(self.live.on(lengths.device)[:, None])

    def entries(self, layer: EvictingStore) -> Entries:
        assert isinstance(layer, PagedStore)
        index = layer.geometry.index
        return Entries(layer.pool.keys, layer.pool.values, self._lengths[index], self._tables[index])

    def columns(self, layer: EvictingStore) -> Mapping[str, torch.Tensor]:
        assert isinstance(layer, PagedStore)
        return layer.pool.columns

    def new_rows(self, layer: EvictingStore) -> torch.Tensor:
        table, lengths = self._tables[layer.geometry.index], self._lengths[layer.geometry.index]
        last = (lengths // PAGE).clamp(max=table.shape[-1] - 1)  # the pages of an ended sequence may be full
        page = table.gather(-1, last.long()[..., None])[..., 0]
        live = self.live.on(lengths.device)[:, None] > 0
        return torch.where(live, page * PAGE + lengths % PAGE, 0).view(-1).long()  # no head owns page 0

    def prepare(self) -> None:
        if self.decode is not None:
            return
        for stack in self.cache.stacks:
            longest = stack.blocks.lengths.max(axis=1) + self._steps + 1
            sizes = self._buckets(longest).reshape(-1, stack.slots).tolist()
            self._sizes |= {store.geometry.index: size for store, size in zip(stack.layers, sizes)}

    def attend(self, layer: EvictingStore, call: AttentionCall) -> torch.Tensor:
        assert isinstance(layer, PagedStore)
        if call.stores:
            write_rows(layer.pool.keys, layer.pool.values, self.new_rows(layer), call)
            self.write_columns(layer, call)
        sizes = self._sizes[call.layer]
        first, *others = sorted({sizes[s] for s in range(self.cache.slots) if self.cache.seen[s]} or {sizes[0]})
        # All slots each time: with a fixed shape, a slot's bits do not depend on others.
        out = self._read(layer, call, first)
        for rows in others:
            part = self._read(layer, call, rows)
            mine = torch.tensor([size == rows for size in sizes], device=part.device)
            out = torch.where(mine[:, None, None, None], part, out)
        return out

    def _read(self, layer: PagedStore, call: AttentionCall, rows: int) -> torch.Tensor:
        table, lengths = self._tables[call.layer], self._lengths[call.layer]  # [S, Hk, W], [S, Hk] int32
        slots, heads = lengths.shape
        row = torch.arange(rows, device=table.device)
        pages = table[:, :, (row // PAGE).clamp(max=table.shape[2] - 1)]  # the mask below hides rows beyond the table
        at = (pages * PAGE + row % PAGE).view(-1)
        keys = layer.pool.keys.index_select(0, at).view(slots, heads, rows, -1)
        values = layer.pool.values.index_select(0, at).view(*keys.shape[:3], layer.pool.values.shape[1])
        # Idle slots and slots of another size must see at least one cache row: a softmax over none is NaN.
        seen = torch.minimum(lengths + 1, torch.full_like(lengths, rows))
        return call.attend(call.query, keys, values, live_bias(seen[..., None], rows, call.query.dtype))

    def _buckets(self, rows: np.ndarray) -> np.ndarray:
        """Return how many cache rows to read for heads of up to `rows` entries: a base size, doubled until it fits."""
        sizes = np.full_like(rows, self.cache.shape.rows if self.fixed else FIXED_ROWS)
        while (small := sizes < rows).any():
            sizes[small] *= 2
        return sizes


def step_writer(cache: SlotCache, rules: Rules, decode: Decode | None = None) -> StepWriter:
    """Return a writer for the cache's layout. decode: the backend of `kernels` that computes the attention; None:
    `AttentionCall.attend`, as on a CPU."""
    if isinstance(cache, DenseCache):
        return DenseStepWriter(cache, rules, decode)
    assert isinstance(cache, PagedCache)
    return PagedStepWriter(cache, rules, decode)


def on_device(device: torch.device | None) -> AbstractContextManager[Any]:
    """Make a layer's own device the current one inside the `with` block, because Triton launches kernels on the current
    device. None: no change."""
    return contextlib.nullcontext() if device is None else torch.cuda.device(device)


def write_rows(keys: torch.Tensor, values: torch.Tensor, at: torch.Tensor, call: AttentionCall) -> None:
    """Write the new entry of every slot and head. at: [S * Hk] indices in keys and values, flattened to [-1, D]."""
    for store, new in ((keys, call.key), (values, call.value)):
        width = store.shape[-1]  # 0 for the values of latent layers without an indexer
        store.view(store.shape[:-1].numel(), width).index_copy_(0, at, new.reshape(at.numel(), width))
