"""PagedCache: every layer and KV head of a slot has its own number of entries, in its own pages.

K, V, positions and columns lie in a pool of pages, one pool per shape of entry; a page belongs to one head of one layer
of one slot. A block table lists the pages of a head in order, so the head's logical row r is row r % PAGE of its page
r // PAGE. Free pages are a list. Compaction fills holes within a head, in the same order as in the dense layout, so
that both layouts give the same tokens for a method that keeps heads equal; empty pages return to the list.

Block tables and lengths are kept on the host (numpy), because they change every step and memory is allocated by them;
they are copied to the device once per step. Page 0 is never allocated: idle slots write and read there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvbench.engine.attention.geometry import LayerGeometry
from kvbench.engine.cache.prompt_layer import PackedLayer
from kvbench.engine.cache.slot_cache import EvictingStore, RingStore, Shape, SlotBatch, SlotCache
from kvbench.engine.rules import Rows
from kvbench.errors import BudgetViolation
from kvbench.eviction.columns import fixed

PAGE = 16  # entries
Index = np.ndarray | int


class Pool:
    """Pages for entries of one shape, shared by all layers with that shape."""

    def __init__(
        self, geometry: LayerGeometry, shape: Shape, pages: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        rows = pages * PAGE
        self.keys = torch.zeros(rows, geometry.head_dim, device=device, dtype=dtype)
        self.values = torch.zeros(rows, geometry.value_dim, device=device, dtype=dtype)
        self.positions = torch.zeros(rows, device=device, dtype=torch.int32)
        self.columns = {c.name: torch.full((rows,), c.init, device=device) for c in shape.columns}
        self.free = list(range(pages - 1, 0, -1))
        self.page_extra = PAGE * 4 * (1 + len(self.columns))  # bytes of positions and columns
        self.page_bytes = PAGE * (geometry.head_dim + geometry.value_dim) * dtype.itemsize + self.page_extra

    def tensors(self) -> list[torch.Tensor]:
        return [self.keys, self.values, self.positions, *self.columns.values()]


class PagedStore(EvictingStore):
    """One layer of all slots: lengths [S, Hk] and block tables [S, Hk, W] into a pool."""

    def __init__(
        self, geometry: LayerGeometry, shape: Shape, pool: Pool, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(geometry, shape, device, dtype)
        self.pool, self.specs, self.device = pool, fixed(shape.columns), device
        heads = (shape.slots, geometry.kv_heads)
        self.lengths = np.zeros(heads, dtype=np.int64)
        self.known = np.zeros(heads, dtype=np.int64)  # rows whose positions and columns are written
        self.table = np.zeros((*heads, -(-shape.rows // PAGE) + 1), dtype=np.int64)
        self.pages = np.zeros(heads, dtype=np.int64)  # pages allocated to each head

    def reserve(self, slots: Sequence[int] | np.ndarray, lengths: np.ndarray) -> None:
        """Allocate and free pages so that the heads of these slots have room for exactly `lengths` [b, Hk] rows."""
        wanted, width = -(-lengths // PAGE), self.table.shape[2]
        if (most := int(wanted.max(initial=0))) > width:
            self.table = np.pad(self.table, ((0, 0), (0, 0), (0, max(most, 2 * width) - width)))
        slots = np.asarray(slots)
        present = self.pages[slots]
        if int((wanted - present).sum()) > len(self.pool.free):
            raise BudgetViolation("more entries are held than this cache was made for.")
        for i, h in zip(*np.nonzero(wanted != present)):
            row, had, want = self.table[slots[i], h], present[i, h], wanted[i, h]
            self.pages[slots[i], h] = want
            if want > had:
                taken = self.pool.free[len(self.pool.free) - (want - had) :]
                del self.pool.free[len(self.pool.free) - (want - had) :]
                row[had:want] = taken
            else:
                self.pool.free.extend(row[want:had].tolist())
                row[want:had] = 0

    def used(self, slot: int) -> int:
        """Return how many pages hold entries of a slot; pages for its next entries may be allocated beside them."""
        return int((-(-self.lengths[slot] // PAGE)).sum())

    def physical(self, slot: Index, head: Index, row: Index) -> torch.Tensor:
        """Return the indices in the pool of these heads' logical rows."""
        return torch.from_numpy(self.table[slot, head, row // PAGE] * PAGE + row % PAGE).to(self.device)

    def live(self, slots: np.ndarray, first: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return (index into `slots`, head, row) of every live row, from row `first` [b, Hk] on."""
        lengths = self.lengths[slots][..., None]
        rows = np.arange(lengths.max(initial=0))
        mask = rows < lengths
        if first is not None:
            mask &= rows >= first[..., None]
        place, head, row = np.nonzero(mask)
        return place, head, row

    def shown(self, slot: int) -> tuple[int, bool]:
        """Return how many rows of a slot a method sees, and whether some heads are padded to that number.

        A slot with uneven heads is padded to whole pages: slots of equal padded length can form one batch, and no
        slot's padding depends on another slot.
        """
        lengths = self.lengths[slot]
        longest = int(lengths.max())
        uneven = int(lengths.min()) < longest
        return (-(-longest // PAGE) * PAGE if uneven else longest), uneven

    def install(self, packed: PackedLayer, slots: Sequence[int], index: torch.Tensor, seen: int) -> None:
        super().install(packed, slots, index, seen)
        lengths = np.array(packed.lengths)
        self.reserve(slots, np.tile(lengths, (len(slots), 1)))
        names = list(self.pool.columns)
        sources = [packed.keys, packed.values, packed.positions, *(packed.columns[name] for name in names)]
        targets = [self.pool.keys, self.pool.values, self.pool.positions, *(self.pool.columns[n] for n in names)]
        for slot in slots:
            self.lengths[slot] = self.known[slot] = lengths
            _, head, row = self.live(np.array([slot]))
            at = self.physical(slot, head, row)
            for target, source in zip(targets, sources):
                target.index_copy_(0, at, source)

    def complete(self, batch: SlotBatch) -> None:
        slots = np.array(batch.slots)
        place, head, row = self.live(slots, self.known[slots])
        if not place.size:
            return
        at = self.physical(slots[place], head, row)
        age = torch.from_numpy(self.lengths[slots[place], head] - row).to(self.device)
        positions = batch.seen[torch.from_numpy(place).to(self.device)] - age
        self.pool.positions.index_copy_(0, at, positions.int())
        for spec in self.specs:
            self.pool.columns[spec.name].index_fill_(0, at, spec.init)
        self.known[slots] = self.lengths[slots]

    def rows(self, batch: SlotBatch) -> Rows:
        slots, lengths = np.array(batch.slots), self.lengths[batch.slots]
        (count, uneven), heads = self.shown(batch.slots[0]), np.arange(lengths.shape[1])
        at = self.physical(slots[:, None, None], heads[None, :, None], np.arange(count)).view(-1)

        def pick(x: torch.Tensor) -> torch.Tensor:
            return x.index_select(0, at).view(len(slots), len(heads), count, *x.shape[1:])

        valid = torch.from_numpy(np.arange(count) < lengths[..., None]).to(self.device) if uneven else None
        columns = {name: pick(column) for name, column in self.pool.columns.items()}
        return Rows(pick(self.pool.keys), pick(self.pool.values), pick(self.pool.positions).long(), columns, valid)

    def write(self, batch: SlotBatch, name: str, value: torch.Tensor) -> None:
        slots = np.array(batch.slots)
        place, head, row = self.live(slots)
        exists = tuple(torch.from_numpy(x).to(self.device) for x in (place, head, row))
        self.pool.columns[name].index_copy_(0, self.physical(slots[place], head, row), value[exists])

    def compact(self, batch: SlotBatch, keep: torch.Tensor) -> None:
        slots, stays = np.array(batch.slots), keep.cpu().numpy()
        counts = stays.sum(axis=-1)
        front = np.arange(stays.shape[2]) < counts[..., None]
        holes, movers = np.nonzero(~stays & front), np.nonzero(stays & ~front)  # as many, head by head
        to = self.physical(slots[holes[0]], *holes[1:])
        source = self.physical(slots[movers[0]], *movers[1:])
        for tensor in self.pool.tensors():
            tensor.index_copy_(0, to, tensor.index_select(0, source))
        self.reserve(slots, counts)
        self.lengths[slots] = self.known[slots] = counts

    def clear(self, slot: int) -> None:
        self.reserve([slot], np.zeros((1, self.lengths.shape[1]), dtype=np.int64))
        self.lengths[slot] = self.known[slot] = 0


class PagedCache(SlotCache):
    def __init__(
        self, geometry: Sequence[LayerGeometry], shape: Shape, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(geometry, shape, device, dtype)
        kinds: dict[tuple[int, int], list[LayerGeometry]] = {}
        for g in geometry:
            if g.evicts:
                kinds.setdefault((g.head_dim, g.value_dim), []).append(g)
        self.pools = {
            kind: Pool(members[0], shape, 1 + pages(members, shape), device, dtype) for kind, members in kinds.items()
        }
        self.layers = [
            PagedStore(g, shape, pool, device, dtype) if pool and g.evicts else RingStore(g, shape, device, dtype)
            for g, pool in ((g, self.pools.get((g.head_dim, g.value_dim))) for g in geometry)
        ]
        self.stores = [layer for layer in self.layers if isinstance(layer, PagedStore)]
        self._heads = sum(store.lengths.shape[1] for store in self.stores)

    def make_room(self, ahead: Sequence[int]) -> None:
        """Allocate pages for the next `ahead` [S] entries of every head of each slot."""
        more = np.array(ahead)[:, None]
        for store in self.stores:
            short = np.nonzero((store.lengths + more > store.pages * PAGE).any(axis=1))[0]
            if short.size:
                store.reserve(short, store.lengths[short] + more[short])

    def advance(self, slots: Sequence[int]) -> None:
        super().advance(slots)
        for store in self.stores:
            store.lengths[list(slots)] += 1

    def clear(self, slot: int) -> None:
        super().clear(slot)
        for store in self.stores:
            store.clear(slot)

    def held(self, slot: int) -> float:
        return float(sum(store.lengths[slot].sum() for store in self.stores)) / max(1, self._heads)

    def batches(self, slots: Sequence[int], stores: Sequence[EvictingStore]) -> list[list[int]]:
        """Group slots with equally many shown rows: a number that depends on the slot alone, not on its neighbours."""
        paged = [store for store in stores if isinstance(store, PagedStore)]
        groups: dict[tuple[tuple[int, bool], ...], list[int]] = {}
        for slot in slots:
            groups.setdefault(tuple(store.shown(slot) for store in paged), []).append(slot)
        return [groups[key] for key in sorted(groups)]

    def settle(self, slots: Sequence[int]) -> None:
        """Do nothing: `PagedStore.compact` has set the lengths of every head."""

    def live_bytes(self, slot: int) -> int:
        used = sum(store.used(slot) * store.pool.page_bytes for store in self.stores)
        return used + self.fixed_bytes(self.seen[slot])

    def extra_bytes(self, slot: int) -> int:
        beside = sum(store.used(slot) * store.pool.page_extra for store in self.stores)
        return beside + self.stored_bytes

    def bytes(self) -> int:
        total = self.stored_bytes * self.slots
        total += sum(layer.bytes() for layer in self.layers if isinstance(layer, RingStore))
        return total + sum(t.nbytes for pool in self.pools.values() for t in pool.tensors())


def pages(layers: Sequence[LayerGeometry], shape: Shape) -> int:
    """Return how many pages suffice for all slots: the pages that `shape.rows` rows per head fill, plus one per head.

    The additional page is for a head's last page, which may be partly filled.
    """
    heads = sum(g.kv_heads for g in layers)
    return shape.slots * heads * (-(-shape.rows // PAGE) + 1)
