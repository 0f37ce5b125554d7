"""SlotCache: the KV cache of a fixed number of slots, one sequence each; the common interface of both layouts.

Keys are stored after RoPE, rotated by their true position, and are never re-indexed. After an eviction a head's entries
are in storage order, not text order. `dense.DenseCache` holds equally many entries in every head of a slot; the heads
of `paged.PagedCache` may hold different numbers. Layers with a sliding window are ring buffers of at most `window`
entries per head, which no method evicts.

Letters: S slots, b slots of a batch, Hk KV heads, n entries per head, D head dimension, t new tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from kvbench.engine.attention.geometry import LayerGeometry
from kvbench.engine.attention.grouped import live_bias
from kvbench.engine.cache.prompt_layer import PackedLayer
from kvbench.engine.cache.recurrent import RecurrentStates, StateShape
from kvbench.engine.replicas import Replicas
from kvbench.eviction.api import Column, State

if TYPE_CHECKING:
    from kvbench.engine.cache.stack import Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The size of a cache: its slots, the entries per head of a slot, and what is stored beside keys and values."""

    slots: int
    rows: int  # entries per head that a slot has room for, averaged over layers and heads
    bounded: bool  # whether a budget keeps every slot about `rows` long; each step then reads all places
    longest: int  # most tokens of a sequence, so the ring of a sliding-window layer needs no more places
    columns: tuple[Column, ...] = ()
    states: tuple[State, ...] = ()
    queries: int = 0  # number of newest queries stored per slot
    sums: bool = False  # whether decode steps sum the attention that each entry receives between two ticks
    marks: tuple[int, ...] = ()  # numbers of steps before a tick at which new sums begin, see `layout.sum_marks`
    hidden: int = 0  # number of newest hidden states stored per slot
    recurrent: tuple[StateShape, ...] = ()  # states of recurrent layers

    @property
    def newest(self) -> int:
        """Number of newest tokens whose queries or hidden states a slot stores."""
        return max(self.queries, self.hidden)


class Store:
    """One layer of a cache, in all slots. This base class holds all but the entries: each slot's newest queries and
    hidden states, the method's states and, if decode steps sum attention, the sums.

    queries: [S, Hq, width, D]; hidden: [S, 1, width, hidden size]; their widths may differ. The query and the hidden
    state of position p lie at p % width. states: each [S, ...]. sums: [S, Hk, g, places], and older: [marks, S, Hk, g,
    places], see `stack.Stack`.
    """

    sums: torch.Tensor | None = None
    older: torch.Tensor | None = None
    keys: torch.Tensor  # [S, Hk, places, D]; a paged layer has a pool instead
    values: torch.Tensor

    def __init__(
        self,
        geometry: LayerGeometry,
        queries: torch.Tensor,
        hidden: torch.Tensor,
        states: dict[str, torch.Tensor],
    ) -> None:
        self.geometry, self.queries, self.hidden, self.states = geometry, queries, hidden, states

    def install(self, packed: PackedLayer, slots: Sequence[int], index: torch.Tensor, seen: int) -> None:
        """Copy one sequence's entries, newest queries and hidden states, and the method's states, all of this layer, to
        several slots. The base class copies all but the entries, which subclasses add.

        seen: tokens of the sequence; index: `slots` as a tensor.
        """
        for name, state in self.states.items():
            state[index] = packed.states[name]
        _fill(self.queries, packed.queries, index, seen)
        _fill(self.hidden, packed.hidden, index, seen)

    def keep_newest(self, query: torch.Tensor, hidden: torch.Tensor | None, places: RowPlaces) -> None:
        """Store the query [S, Hq, 1, D] and hidden state [S, 1, hidden size] of one new token of every slot."""
        if self.queries.shape[2]:
            places.put(self.queries, query)
        if self.hidden.shape[2]:
            assert hidden is not None  # else reading the prompt would have failed before
            places.put(self.hidden, hidden)

    def wipe(self, slot: int) -> None:
        """Zero a slot's keys and values, see `SlotCache.wipe`."""
        self.keys[slot] = 0
        self.values[slot] = 0

    def extra_bytes(self) -> int:
        """Return the bytes of the queries, hidden states, method's states and sums that this layer stores for one
        slot."""
        stored = (self.queries, self.hidden, *self.states.values())
        sums = 0 if self.sums is None else self.sums[0].nbytes
        older = 0 if self.older is None else self.older[:, 0].nbytes
        return sum(t[0].nbytes for t in stored) + sums + older


class RowPlaces:
    """The cache rows in which each head of each slot stores a vector of the slot's new token.

    In a tensor [S, heads, width, D] this is row n, where n [S] is how many entries the heads of each slot hold. In
    rings it is row n % width, where n is the position of the new token. Rows and masks are computed once for all
    tensors of one size.
    """

    def __init__(self, numbers: Replicas, *, rings: bool) -> None:
        self._numbers, self._rings = numbers, rings
        self._rows: dict[tuple[int, int, torch.device], torch.Tensor] = {}
        self._biases: dict[tuple[int, torch.device], torch.Tensor] = {}

    def of(self, store: torch.Tensor) -> torch.Tensor:
        """Return where each head of each slot stores its new vector: row indices [S * heads] into `store`
        [S, heads, width, D], flattened to [-1, D]."""
        slots, heads, width, _ = store.shape
        kind = heads, width, store.device
        if kind not in self._rows:
            first = (torch.arange(slots * heads, device=store.device) * width).view(slots, heads)
            numbers = self._numbers.on(store.device)
            self._rows[kind] = (first + (numbers % width if self._rings else numbers)[:, None]).view(-1)
        return self._rows[kind]

    def put(self, ring: torch.Tensor, new: torch.Tensor) -> None:
        """Store one new vector per slot and head in a ring [S, heads, width, D]."""
        ring.view(-1, ring.shape[-1]).index_copy_(0, self.of(ring), new.reshape(-1, ring.shape[-1]))

    def bias(self, store: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the additive mask [S, 1, 1, width] that hides the rows of a tensor that hold no entry, not even a new
        one."""
        kind = store.shape[2], store.device
        if kind not in self._biases:
            live = self._numbers.on(store.device) + 1
            live = live.clamp(max=store.shape[2]) if self._rings else live
            self._biases[kind] = live_bias(live[:, None, None], store.shape[2], dtype)
        return self._biases[kind]


def _fill(ring: torch.Tensor, newest: torch.Tensor, index: torch.Tensor, seen: int) -> None:
    """Store one sequence's newest vectors [heads, w, D], oldest first, in several slots' rings [S, heads, width, D].
    index: the slots; seen: tokens of the sequence. The vector of position p goes to place p % width."""
    if width := ring.shape[2]:
        count = min(width, newest.shape[1])
        at = torch.arange(seen - count, seen, device=index.device) % width
        ring[index[:, None], :, at] = newest[:, newest.shape[1] - count :].transpose(0, 1)


class RingStore(Store):
    """A sliding-window layer, in all slots. Each head is a ring buffer: the entry of position p lies at place
    p % capacity."""

    def __init__(self, geometry: LayerGeometry, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        assert geometry.window is not None
        g, self.capacity = geometry, min(geometry.window, shape.longest)
        no_queries = torch.zeros(shape.slots, g.query_heads, 0, g.head_dim, device=device, dtype=dtype)
        no_hidden = torch.zeros(shape.slots, 1, 0, g.hidden, device=device, dtype=dtype)
        super().__init__(geometry, no_queries, no_hidden, {})
        self.keys = torch.zeros(shape.slots, g.kv_heads, self.capacity, g.head_dim, device=device, dtype=dtype)
        self.values = torch.zeros(shape.slots, g.kv_heads, self.capacity, g.value_dim, device=device, dtype=dtype)

    def install(self, packed: PackedLayer, slots: Sequence[int], index: torch.Tensor, seen: int) -> None:
        super().install(packed, slots, index, seen)
        for mine, theirs in ((self.keys, packed.keys), (self.values, packed.values)):
            _fill(mine, theirs.unflatten(0, (self.geometry.kv_heads, -1)), index, seen)  # all heads alike

    def bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


class EvictingStore(Store):
    """A layer that methods evict, in all slots: a part of a `stack.Stack`."""


class SlotCache(ABC):
    """The KV cache of all layers and slots.

    device: the device that the model's inputs are on. devices: this device and those of the layers; each layer's
    tensors are on the layer's own device (`LayerGeometry.on`).
    seen: per slot, the tokens read so far, which is also the sequence's next absolute position; 0: the slot is idle.
    fresh: per slot, how many of the newest entries in each head lack positions and columns (see `Stack.complete`).
    """

    layers: list[RingStore | EvictingStore]
    stacks: Sequence[Stack]  # of all evicted layers

    def __init__(
        self, geometry: Sequence[LayerGeometry], shape: Shape, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.geometry, self.shape, self.device, self.dtype = geometry, shape, device, dtype
        self.slots = shape.slots
        self.devices = tuple(dict.fromkeys((device, *(g.on(device) for g in geometry))))
        self.seen, self.fresh = [0] * shape.slots, [0] * shape.slots
        self.recurrent = RecurrentStates.allocate(shape.recurrent, shape.slots, device)

    @property
    def evicting(self) -> list[EvictingStore]:
        return [layer for layer in self.layers if isinstance(layer, EvictingStore)]

    def install(self, packed: Mapping[int, PackedLayer], slots: Sequence[int], seen: int) -> None:
        """Copy one sequence of `seen` tokens to several slots. packed: its layers, by index."""
        index = {device: torch.tensor(slots, device=device) for device in self.devices}
        for layer in self.layers:
            layer.install(packed[layer.geometry.index], slots, index[layer.geometry.on(self.device)], seen)
        for slot in slots:
            self.seen[slot], self.fresh[slot] = seen, 0

    def install_states(self, states: RecurrentStates | None, row: int, slots: Sequence[int]) -> None:
        """Copy one sequence's states of recurrent layers, row `row` of `states`, to several slots."""
        if self.recurrent is not None and states is not None:
            self.recurrent.install(states, row, torch.tensor(slots, device=self.device))

    def saved_states(self) -> list[torch.Tensor]:
        """Return copies, in the host's memory, of the tensors whose old values a step builds on: states of recurrent
        layers, and attention sums."""
        return [torch.clone(state) if state.device.type == "cpu" else state.cpu() for state in self._continued()]

    def restore_states(self, saved: Sequence[torch.Tensor]) -> None:
        """Undo all changes of these tensors since `saved_states` returned `saved`."""
        for state, before in zip(self._continued(), saved, strict=True):
            state.copy_(before)

    def _continued(self) -> list[torch.Tensor]:
        states = [] if self.recurrent is None else [state for *_, state in self.recurrent.each()]
        return states + [stack.sums for stack in self.stacks if stack.sums is not None]

    @abstractmethod
    def make_room(self, ahead: Sequence[int]) -> None:
        """Make room for the next tokens of each slot. ahead: [S], the number of these tokens."""

    def advance(self, slots: Sequence[int]) -> None:
        """Count the token that a step has written to each of these slots."""
        for slot in slots:
            self.seen[slot] += 1
            self.fresh[slot] += 1

    def clear(self, slot: int) -> None:
        """Empty a slot whose sequence has ended. The cache's memory stays allocated."""
        self.seen[slot] = self.fresh[slot] = 0

    def wipe(self, slot: int) -> None:
        """Zero the keys, values and states of recurrent layers of a slot whose sequence ended with NaN or infinite
        logits.

        Else the keys and values would spoil the slot's next sequence: attention also reads places without an entry,
        with weight 0, and 0 times NaN is NaN. In the paged layout the states would spoil all other sequences: every
        step computes a new entry for an idle slot too, and writes this entry to page 0, whose places all slots may read
        with weight 0.
        """
        for layer in self.layers:
            layer.wipe(slot)
        if self.recurrent is not None:
            for *_, state in self.recurrent.each():
                state[slot] = 0

    @abstractmethod
    def held(self, slot: int) -> float:
        """Return the number of entries that a head of the slot holds, a mean over all heads of evicted layers."""

    @abstractmethod
    def settle(self, sizes: Mapping[int, int]) -> None:
        """Finish the eviction of some slots, after `Stack.compact` was called for all their layers. sizes: maps each of
        these slots to the entries per head that it may keep."""

    @abstractmethod
    def live_bytes(self, slot: int) -> int:
        """Return the bytes that a slot's sequence uses now: `stored_bytes` and all entries, also of sliding windows. In
        a paged cache, a page that holds an entry counts as a whole."""

    @abstractmethod
    def extra_bytes(self, slot: int) -> int:
        """Return the part of `live_bytes` that holds neither keys nor values: positions, columns, `stored_bytes`.
        Sliding-window layers store no positions and no columns."""

    @abstractmethod
    def bytes(self) -> int:
        """Return the allocated bytes of all slots."""

    def slot_bytes(self) -> int:
        return self.bytes() // self.slots

    def fixed_bytes(self, seen: int) -> int:
        """Return the bytes of a slot that no eviction frees: `stored_bytes`, and the entries of sliding-window layers.
        seen: tokens that the slot's sequence has read."""
        return self.stored_bytes + sum(min(seen, rows) * size for rows, size in self._rings)

    @cached_property
    def _rings(self) -> list[tuple[int, int]]:
        """For each sliding-window layer: how many places a slot's ring has, and the bytes of one place in all heads."""
        rings, element = (layer for layer in self.layers if isinstance(layer, RingStore)), self.dtype.itemsize
        return [(ring.capacity, ring.geometry.entry_bytes(element)) for ring in rings]

    @cached_property
    def stored_bytes(self) -> int:
        """Bytes of one slot's stored queries, hidden states and attention sums, and of its states, both the method's
        and the model's. The number does not depend on the slot's tokens."""
        return sum(layer.extra_bytes() for layer in self.layers) + self.state_bytes

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of one slot's states of recurrent layers."""
        return sum(state.bytes for state in self.shape.recurrent)
