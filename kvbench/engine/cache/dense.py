"""DenseCache: every head of a slot holds the same number of entries, so one length per slot serves all heads.

Per layer K and V are [slots, kv_heads, capacity, head_dim]; a slot's first `length` rows are live. Compaction to C rows
fills holes: kept entries in the first C rows stay, kept entries behind them move into the holes. So compaction moves at
most the entries added since the last eviction, whatever the size of the cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvbench.engine.attention.geometry import LayerGeometry
from kvbench.engine.cache.prompt_layer import PackedLayer
from kvbench.engine.cache.slot_cache import EvictingStore, RingStore, Shape, SlotBatch, SlotCache
from kvbench.engine.rules import Rows
from kvbench.eviction.columns import fixed


class DenseStore(EvictingStore):
    """One layer of all slots. `lengths`: the cache's list of live rows per slot, shared by all layers."""

    def __init__(
        self, geometry: LayerGeometry, shape: Shape, device: torch.device, dtype: torch.dtype, lengths: list[int]
    ) -> None:
        super().__init__(geometry, shape, device, dtype)
        g, self.capacity, self.lengths = geometry, shape.rows, lengths
        self.specs = fixed(shape.columns)
        size = (shape.slots, g.kv_heads, shape.rows)
        self.keys = torch.zeros(*size, g.head_dim, device=device, dtype=dtype)
        self.values = torch.zeros(*size, g.value_dim, device=device, dtype=dtype)
        self.positions = torch.zeros(size, device=device, dtype=torch.int32)
        self.columns = {c.name: torch.full(size, c.init, device=device) for c in shape.columns}
        self.known = [0] * shape.slots  # rows whose positions and columns are written

    def install(self, packed: PackedLayer, slots: Sequence[int], index: torch.Tensor, seen: int) -> None:
        super().install(packed, slots, index, seen)
        length, heads = packed.lengths[0], self.geometry.kv_heads
        mine = [self.keys, self.values, self.positions, *self.columns.values()]
        theirs = [packed.keys, packed.values, packed.positions, *(packed.columns[name] for name in self.columns)]
        for to, source in zip(mine, theirs):
            to[index, :, :length] = source.view(heads, length, *source.shape[1:])
        for slot in slots:
            self.known[slot] = length

    def complete(self, batch: SlotBatch) -> None:
        length = self.lengths[batch.slots[0]]
        for known in sorted({self.known[s] for s in batch.slots}):
            some = [i for i, s in enumerate(batch.slots) if self.known[s] == known]
            whole = len(some) == len(batch.slots)
            seen = batch.seen if whole else batch.seen[some]
            at: torch.Tensor | slice = batch.index[some]
            if whole:
                at = slice(None) if batch.all_slots else batch.index
            ages = torch.arange(length - known, 0, -1, device=seen.device)
            self.positions[at, :, known:length] = (seen[:, None] - ages).int()[:, None, :]
            for spec in self.specs:
                self.columns[spec.name][at, :, known:length] = spec.init
        for s in batch.slots:
            self.known[s] = length

    def rows(self, batch: SlotBatch) -> Rows:
        length = self.lengths[batch.slots[0]]

        def pick(x: torch.Tensor) -> torch.Tensor:
            return x[:, :, :length] if batch.all_slots else x[batch.index, :, :length]

        columns = {name: pick(column) for name, column in self.columns.items()}
        return Rows(pick(self.keys), pick(self.values), pick(self.positions).long(), columns, None)

    def write(self, batch: SlotBatch, name: str, value: torch.Tensor) -> None:
        self.columns[name][slice(None) if batch.all_slots else batch.index, :, : value.shape[-1]] = value

    def compact(self, batch: SlotBatch, keep: torch.Tensor) -> None:
        count, heads = batch.allowed, self.geometry.kv_heads
        holes = (~keep[..., :count]).nonzero()  # [m, 3] (sequence, head, row), as many as there are movers,
        movers = keep[..., count:].nonzero()  # and in the same (sequence, head) order
        base = (batch.index[holes[:, 0]] * heads + holes[:, 1]) * self.capacity
        to, source = base + holes[:, 2], base + count + movers[:, 2]
        rows = [self.keys.view(-1, self.geometry.head_dim), self.values.view(-1, self.geometry.value_dim)]
        flat = [self.positions.view(-1), *(c.view(-1) for c in self.columns.values())]
        for tensor in rows + flat:
            tensor.index_copy_(0, to, tensor.index_select(0, source))
        for s in batch.slots:
            self.known[s] = min(count, keep.shape[-1])

    def bytes(self) -> int:
        return sum(t.nbytes for t in (self.keys, self.values, self.positions, *self.columns.values()))


class DenseCache(SlotCache):
    def __init__(
        self, geometry: Sequence[LayerGeometry], shape: Shape, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(geometry, shape, device, dtype)
        self.lengths = [0] * shape.slots  # live rows of each slot in the evicting layers
        self.layers = [
            DenseStore(g, shape, device, dtype, self.lengths) if g.evicts else RingStore(g, shape, device, dtype)
            for g in geometry
        ]
        heads = sum(g.kv_heads for g in geometry if g.evicts)
        self._beside_bytes = 4 * (1 + len(shape.columns)) * heads  # of one entry in every head: position and columns
        entry = sum(g.entry_bytes(dtype.itemsize) - 4 * g.kv_heads for g in geometry if g.evicts)
        self._entry_bytes = self._beside_bytes + entry

    def install(self, packed: Mapping[int, PackedLayer], slots: Sequence[int], seen: int) -> None:
        super().install(packed, slots, seen)
        length = next((packed[store.geometry.index].lengths[0] for store in self.evicting), 0)
        for slot in slots:
            self.lengths[slot] = length

    def make_room(self, ahead: Sequence[int]) -> None:
        """Do nothing: the rows of every slot are allocated."""

    def advance(self, slots: Sequence[int]) -> None:
        super().advance(slots)
        for slot in slots:
            self.lengths[slot] += 1

    def clear(self, slot: int) -> None:
        super().clear(slot)
        self.lengths[slot] = 0

    def held(self, slot: int) -> float:
        return self.lengths[slot]

    def batches(self, slots: Sequence[int], stores: Sequence[EvictingStore]) -> list[list[int]]:
        """Group slots of equal length. In a steady state all sequences hold equally many entries: one group."""
        return [[s for s in slots if self.lengths[s] == n] for n in sorted({self.lengths[s] for s in slots})]

    def settle(self, slots: Sequence[int]) -> None:
        store = self.evicting[0]
        assert isinstance(store, DenseStore)
        for slot in slots:
            self.lengths[slot] = store.known[slot]

    def live_bytes(self, slot: int) -> int:
        return self.lengths[slot] * self._entry_bytes + self.fixed_bytes(self.seen[slot])

    def extra_bytes(self, slot: int) -> int:
        return self.lengths[slot] * self._beside_bytes + self.stored_bytes

    def bytes(self) -> int:
        total = self.stored_bytes * self.slots
        return total + sum(layer.bytes() for layer in self.layers if isinstance(layer, (DenseStore, RingStore)))
