"""SlotCache: the KV memory of a fixed number of slots, one sequence each.

Per layer K and V are dense [slots, kv_heads, capacity, head_dim] with absolute positions and the method's columns
beside them. Keys are stored after RoPE at their true position and never re-indexed. A slot's first `length` rows are
live; after an eviction they are in storage order, not text order. Every head of a slot holds the same number of
entries, so one length per slot serves all of them; methods with uneven heads need another layout behind this
interface.

Layers with a sliding window are rings of `window` rows that no method touches.

Letters: S slots, Hk KV heads, P capacity, n live entries, D head dimension, t new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvbench.engine.geometry import LayerGeometry
from kvbench.eviction.api import Column


class LayerStore:
    """Tensors of one layer for all slots."""

    def __init__(
        self,
        geometry: LayerGeometry,
        slots: int,
        capacity: int,
        columns: Sequence[Column],
        queries: int,
        longest: int | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        g = self.geometry = geometry
        self.ring = min(g.window, longest) if g.window and longest else None
        self.capacity = rows = self.ring or capacity
        self.keys = torch.zeros(slots, g.kv_heads, rows, g.head_dim, device=device, dtype=dtype)
        self.values = torch.zeros(slots, g.kv_heads, rows, g.value_dim, device=device, dtype=dtype)
        if not g.evicts:
            columns, queries = (), 0
        self.positions = torch.zeros(slots, g.kv_heads, rows, device=device, dtype=torch.int32) if g.evicts else None
        self.columns = {
            c.name: torch.full((slots, g.kv_heads, rows), c.init, device=device, dtype=torch.float32) for c in columns
        }
        # The last `queries` post-RoPE queries; the query of position p lies at p % queries.
        self.queries = (
            torch.zeros(slots, g.query_heads, queries, g.head_dim, device=device, dtype=dtype) if queries else None
        )

    def copy_slot(self, other: LayerStore, source: int, slots: torch.Tensor, length: int, seen: int) -> None:
        """Copy `length` live rows of `other`'s slot into several slots. `seen`: tokens of that sequence so far."""
        if self.ring is not None:
            kept = min(seen, self.ring)
            at = torch.arange(seen - kept, seen, device=slots.device)
            rows = at if other.ring is None else at % other.ring
            self.keys[slots[:, None], :, at % self.ring] = other.keys[source][:, rows].transpose(0, 1)
            self.values[slots[:, None], :, at % self.ring] = other.values[source][:, rows].transpose(0, 1)
            return
        self.keys[slots, :, :length] = other.keys[source, :, :length]
        self.values[slots, :, :length] = other.values[source, :, :length]
        if self.positions is not None and other.positions is not None:
            self.positions[slots, :, :length] = other.positions[source, :, :length]
        for name, column in self.columns.items():
            column[slots, :, :length] = other.columns[name][source, :, :length]
        if self.queries is not None and other.queries is not None:
            self.queries[slots] = other.queries[source]


class SlotCache:
    """All layers of all slots, and each slot's length on host and device.

    Args:
        slots: sequences held at once.
        capacity: rows a slot.
        columns, queries: what the method stores: per-entry tensors, and how many of the newest queries.
        bounded: a budget keeps every slot near `capacity`, so rows are read whole.
        longest: tokens a sequence may have; sliding-window layers become rings of at most that. None (while a prompt is
            read) keeps every row of them.
    """

    def __init__(
        self,
        geometry: Sequence[LayerGeometry],
        *,
        slots: int,
        capacity: int,
        columns: Sequence[Column] = (),
        queries: int = 0,
        longest: int | None = None,
        bounded: bool = False,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.bounded = bounded
        self.slots, self.capacity, self.query_rows = slots, capacity, queries
        self.device, self.dtype, self.column_specs = device, dtype, tuple(columns)
        self.layers = [LayerStore(g, slots, self.capacity, columns, queries, longest, device, dtype) for g in geometry]
        self.lengths = [0] * slots  # live rows of each slot in the evicting layers
        self.seen = [0] * slots  # tokens of each slot's sequence so far: the next absolute position

    def copy_from(self, other: SlotCache, source: int, slots: Sequence[int]) -> None:
        """Install one sequence of `other` (a prompt just read) into several slots."""
        index = torch.tensor(slots, device=self.device)
        length, seen = other.lengths[source], other.seen[source]
        for mine, theirs in zip(self.layers, other.layers):
            mine.copy_slot(theirs, source, index, length, seen)
        for slot in slots:
            self.lengths[slot], self.seen[slot] = length, seen

    def entry_bytes(self) -> int:
        """Bytes of one entry over all evicting layers and their heads, columns included."""
        element = self.dtype.itemsize
        return sum(
            layer.geometry.entry_bytes(element) + 4 * layer.geometry.kv_heads * len(layer.columns)
            for layer in self.layers
            if layer.geometry.evicts
        )

    def fixed_bytes(self, seen: int) -> int:
        """Bytes of a slot that do not depend on its length: stored queries, and rings filled up to `seen` tokens."""
        element = self.dtype.itemsize
        total = 0
        for layer in self.layers:
            g = layer.geometry
            if layer.queries is not None:
                total += g.query_heads * self.query_rows * g.head_dim * element
            if g.window is not None:
                total += min(seen, g.window) * g.entry_bytes(element)
        return total

    def slot_bytes(self) -> int:
        """Bytes allocated for one slot."""
        return sum(_size(layer) for layer in self.layers) // self.slots


def _size(layer: LayerStore) -> int:
    tensors = [layer.keys, layer.values, *layer.columns.values()]
    tensors += [t for t in (layer.positions, layer.queries) if t is not None]
    return sum(t.numel() * t.element_size() for t in tensors)


def plan_slot_bytes(
    geometry: Sequence[LayerGeometry], capacity: int, longest: int, columns: int, queries: int, dtype: torch.dtype
) -> int:
    """Bytes a slot would take, without allocating it."""
    meta = SlotCache(
        geometry,
        slots=1,
        capacity=capacity,
        columns=[Column(name=str(i)) for i in range(columns)],
        queries=queries,
        longest=longest,
        device=torch.device("meta"),
        dtype=dtype,
    )
    return meta.slot_bytes()
