"""DenseCache: every head of a slot holds the same number of entries, so a slot has one length for all heads.

K of all layers of one geometry is one tensor [rows, kv_heads, capacity, head_dim], V another; a row is one layer of one
slot (see `stack`). In each head of a row, the first `length` places hold entries. Compaction to C entries fills holes:
kept entries in the first C places stay, and kept entries behind place C move into the places of dropped entries. So
compaction moves, per head, at most the entries behind place C. If C is the same at each eviction, these are the entries
added since the last eviction, however large the cache is.

Letters: S slots, b rows of a batch, Hk KV heads, n entries per head, D head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from kvbench.engine.attention.geometry import LayerGeometry
from kvbench.engine.cache.prompt_layer import PackedLayer
from kvbench.engine.cache.slot_cache import EvictingStore, RingStore, Shape, SlotCache
from kvbench.engine.cache.stack import RowBatch, Stack, alike, copy_rows, moves, placeholder
from kvbench.engine.rules import Rows
from kvbench.errors import BudgetViolation
from kvbench.eviction.checks import refuse
from kvbench.eviction.columns import fixed


class DenseStore(EvictingStore):
    """One layer of a dense cache, in all slots: K, V [S, Hk, capacity, D], positions and columns [S, Hk, capacity]."""

    def __init__(self, stack: DenseStack, place: int) -> None:
        rows = stack.of_layer(place)
        states = {name: state[rows] for name, state in stack.states.items()}
        super().__init__(stack.members[place], stack.queries[rows], stack.hidden[rows], states)
        self.capacity = stack.capacity
        self.keys, self.values, self.positions = stack.keys[rows], stack.values[rows], stack.positions[rows]
        self.columns = {name: column[rows] for name, column in stack.columns.items()}
        self.sums = None if stack.sums is None else stack.sums[rows]
        self.older = None if stack.older is None else stack.older[:, rows]

    def install(self, packed: PackedLayer, slots: Sequence[int], index: torch.Tensor, seen: int) -> None:
        super().install(packed, slots, index, seen)
        length, heads = packed.lengths[0], self.geometry.kv_heads
        mine = [self.keys, self.values, self.positions, *self.columns.values()]
        theirs = [packed.keys, packed.values, packed.positions, *(packed.columns[name] for name in self.columns)]
        for to, source in zip(mine, theirs):
            to[index, :, :length] = source.view(heads, length, *source.shape[1:])
        if self.sums is not None:
            self.sums[index] = 0
        if self.older is not None:
            self.older[:, index] = 0


class DenseStack(Stack):
    """Layers of one geometry in a dense cache. lengths: entries per head of each slot; the cache updates the list."""

    def __init__(
        self,
        members: Sequence[LayerGeometry],
        shape: Shape,
        device: torch.device,
        dtype: torch.dtype,
        lengths: list[int],
    ) -> None:
        super().__init__(members, shape, device, dtype)
        g, self.capacity, self.lengths = self.geometry, shape.rows, lengths
        self.specs = fixed(shape.columns)
        size = (len(members) * shape.slots, g.kv_heads, shape.rows)
        self.keys = torch.zeros(*size, g.head_dim, device=device, dtype=dtype)
        self.values = torch.zeros(*size, g.value_dim, device=device, dtype=dtype)
        self.positions = torch.zeros(size, device=device, dtype=torch.int32)
        self.columns = {c.name: torch.full(size, c.init, device=device) for c in shape.columns}
        if shape.sums:
            self.sums = torch.zeros(*size[:2], g.group, shape.rows, device=device)
        if shape.marks:
            self.older = torch.zeros(len(shape.marks), *size[:2], g.group, shape.rows, device=device)
        self.layers = [DenseStore(self, place) for place in range(len(members))]

    def shown(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        lengths = self.filled(rows if rows.ndim == 1 else rows[:, 0])
        return lengths, np.zeros_like(lengths)

    def filled(self, rows: np.ndarray) -> np.ndarray:
        return np.array(self.lengths)[rows % self.slots]

    def complete(self, batch: RowBatch, new: int) -> None:
        length = self._length(batch)
        ages = torch.arange(new, 0, -1, device=self.device)
        self.positions[batch.at, :, length - new : length] = (batch.seen[:, None] - ages).int()[:, None, :]
        for spec in self.specs:
            self.columns[spec.name][batch.at, :, length - new : length] = spec.init

    def entries(self, batch: RowBatch, *, keys: bool = True, values: bool = True) -> Rows:
        length = self._length(batch)
        size = len(batch.rows), self.geometry.kv_heads, length

        def pick(x: torch.Tensor) -> torch.Tensor:
            return x[batch.at, :, :length]

        columns = {name: pick(column) for name, column in self.columns.items()}
        return Rows(
            keys=pick(self.keys) if keys else placeholder(self.keys, *size),
            values=pick(self.values) if values else placeholder(self.values, *size),
            positions=pick(self.positions).long(),
            columns=columns,
            valid=None,
        )

    def write_column(self, batch: RowBatch, name: str, value: torch.Tensor) -> None:
        self.columns[name][batch.at, :, : value.shape[-1]] = value

    def compact(self, batch: RowBatch, keep: torch.Tensor) -> None:
        count, length = batch.allowed, keep.shape[-1]
        if batch.kernels and length > count:
            self._compact_by_kernel(batch, keep)
            return
        fewest = min(count, length)
        _refuse_fewer((fewest - keep.sum(dim=-1)).amax().clamp(min=0), fewest)
        if length <= count:
            return
        heads = torch.arange(self.geometry.kv_heads, device=self.device)
        base = ((batch.index[:, None] * len(heads) + heads) * self.capacity)[..., None]
        movers, holes = moves(~keep[..., :count], keep[..., count:], length - count)
        # All heads copy equally many places: a head with fewer movers copies its last place, now unused, onto itself.
        source = (base + torch.where(movers < 0, length - 1, movers + count)).view(-1)
        to = (base + torch.where(holes < 0, length - 1, holes)).view(-1)
        rows = [x.view(x.shape[:3].numel(), x.shape[3]) for x in (self.keys, self.values)]  # -1 fails at width 0
        flat = [self.positions.view(-1), *(c.view(-1) for c in self.columns.values())]
        copy_rows(rows + flat, source, to)

    def _compact_by_kernel(self, batch: RowBatch, keep: torch.Tensor) -> None:
        """Do by Triton what `compact` does by PyTorch, for rows with more entries than `batch.allowed`."""
        from kvbench.engine.cache import compaction_kernel

        count = batch.allowed
        missing = compaction_kernel.compact(
            keep,
            max(1, min(count, keep.shape[-1] - count)),
            [self.keys, self.values, self.positions, *self.columns.values()],
            batch.index,
            self.capacity,
            fewest=count,
        )
        _refuse_fewer(missing.amax(), count)

    def bytes(self) -> int:
        return sum(t.nbytes for t in (self.keys, self.values, self.positions, *self.columns.values()))

    def _length(self, batch: RowBatch) -> int:
        return self.lengths[int(batch.rows[0]) % self.slots]


class DenseCache(SlotCache):
    stacks: list[DenseStack]

    def __init__(
        self, geometry: Sequence[LayerGeometry], shape: Shape, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(geometry, shape, device, dtype)
        self.lengths = [0] * shape.slots  # entries per head of each slot in evicted layers
        self.stacks = [
            DenseStack(members, shape, members[0].on(device), dtype, self.lengths) for members in alike(geometry)
        ]
        stores = {store.geometry.index: store for stack in self.stacks for store in stack.layers}
        self.layers = [stores.get(g.index) or RingStore(g, shape, g.on(device), dtype) for g in geometry]
        heads = sum(g.kv_heads for g in geometry if g.evicts)
        self._beside_bytes = 4 * (1 + len(shape.columns)) * heads  # position and columns of one entry per head
        entry = sum(g.entry_bytes(dtype.itemsize) - 4 * g.kv_heads for g in geometry if g.evicts)
        self._entry_bytes = self._beside_bytes + entry

    def install(self, packed: Mapping[int, PackedLayer], slots: Sequence[int], seen: int) -> None:
        super().install(packed, slots, seen)
        length = next((packed[store.geometry.index].lengths[0] for store in self.evicting), 0)
        for slot in slots:
            self.lengths[slot] = length

    def make_room(self, ahead: Sequence[int]) -> None:
        """Do nothing: the memory of every slot was allocated when the cache was made."""

    def advance(self, slots: Sequence[int]) -> None:
        super().advance(slots)
        for slot in slots:
            self.lengths[slot] += 1

    def clear(self, slot: int) -> None:
        super().clear(slot)
        self.lengths[slot] = 0

    def held(self, slot: int) -> float:
        return self.lengths[slot]

    def settle(self, sizes: Mapping[int, int]) -> None:
        for slot, size in sizes.items():
            self.lengths[slot] = min(self.lengths[slot], size)

    def live_bytes(self, slot: int) -> int:
        return self.lengths[slot] * self._entry_bytes + self.fixed_bytes(self.seen[slot])

    def extra_bytes(self, slot: int) -> int:
        return self.lengths[slot] * self._beside_bytes + self.stored_bytes

    def bytes(self) -> int:
        total = self.stored_bytes * self.slots + sum(stack.bytes() for stack in self.stacks)
        return total + sum(layer.bytes() for layer in self.layers if isinstance(layer, RingStore))


def _refuse_fewer(missing: torch.Tensor, count: int) -> None:
    """Raise BudgetViolation if a head keeps fewer than `count` entries. missing: a tensor with one integer, the
    number of entries that the head lacks; 0: no error.

    A slot has one length for all its heads: a head with fewer entries would show dropped entries as if it held them.
    While `Evictor.tick` runs, the check is delayed, as `eviction.checks.gathered` says.
    """
    refuse(missing, lambda n: BudgetViolation(f"a head kept {count - n} entries; the dense layout needs {count}."))
