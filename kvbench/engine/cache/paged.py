"""PagedCache: every KV head of a slot has its own number of entries, in its own pages, in each layer that methods
evict. A layer with a sliding window has ring buffers instead (`RingStore`).

K, V, positions and columns of the evicted layers lie in a pool of pages, which docs/engine.md (Two layouts) describes.
Layers share a pool if they are on one device and their entries have the same shape. A head's entry i lies at place i %
PAGE of the head's page i // PAGE. The host allocates the pages; `BlockTable` says which head has which. Page 0 belongs
to no head: idle slots write to it, and a write of fixed shape puts its surplus elements there.

Letters: S slots, b rows of a batch, Hk KV heads, n places per head, W pages per head in the block table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvbench.engine.attention.geometry import LayerGeometry
from kvbench.engine.cache.block_table import BlockTable
from kvbench.engine.cache.pool import PAGE, Pool, pages
from kvbench.engine.cache.prompt_layer import PackedLayer
from kvbench.engine.cache.slot_cache import EvictingStore, RingStore, Shape, SlotCache
from kvbench.engine.cache.stack import RowBatch, Stack, alike, copy_rows, moves, placeholder
from kvbench.engine.rules import Rows
from kvbench.eviction.checks import read
from kvbench.eviction.columns import fixed


@dataclass(frozen=True, slots=True)
class Cut:
    """A method's decision about which entries of a batch of rows stay; `PagedCache.settle` later drops the others."""

    batch: RowBatch
    keep: torch.Tensor  # [b, Hk, n] bool
    counts: torch.Tensor  # [b, Hk] entries kept
    movers: torch.Tensor  # [1] most entries of a head that must move


class PagedStore(EvictingStore):
    """One layer of a paged cache, in all slots. Its entries lie in the pool of its stack."""

    def __init__(self, stack: PagedStack, place: int) -> None:
        rows = stack.of_layer(place)
        states = {name: state[rows] for name, state in stack.states.items()}
        super().__init__(stack.members[place], stack.queries[rows], stack.hidden[rows], states)
        self.stack, self.rows, self.pool = stack, rows, stack.pool

    def table(self) -> torch.Tensor:
        """Return the block tables of this layer on the device, [S, Hk, W] int32."""
        return self.stack.blocks.table_on_device()[self.rows]

    def wipe(self, slot: int) -> None:
        pages = self.table()[slot].view(-1).long()
        for tensor in (self.pool.keys, self.pool.values):
            tensor.unflatten(0, (-1, PAGE))[pages] = 0

    def install(self, packed: PackedLayer, slots: Sequence[int], index: torch.Tensor, seen: int) -> None:
        super().install(packed, slots, index, seen)
        rows = self.rows.start + np.asarray(slots)
        self.stack.blocks.resize(rows, np.tile(np.array(packed.lengths), (len(slots), 1)))
        at = self.stack.blocks.live(rows)
        names = list(self.pool.columns)
        sources = [packed.keys, packed.values, packed.positions, *(packed.columns[name] for name in names)]
        for target, source in zip(self.pool.tensors(), sources):
            target[at] = source


class PagedStack(Stack):
    layers: list[PagedStore]

    def __init__(
        self,
        members: Sequence[LayerGeometry],
        shape: Shape,
        pool: Pool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(members, shape, device, dtype)
        self.pool, self.specs = pool, fixed(shape.columns)
        rows = len(members) * shape.slots
        self.blocks = BlockTable(pool, rows, shape.slots, self.geometry.kv_heads, shape.rows, device)
        self.layers = [PagedStore(self, place) for place in range(len(members))]
        self._cuts: list[Cut] = []

    def shown(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each view, how many places per head it shows, and whether shorter heads are padded.

        The number of places is the length of the longest head. If heads are uneven, the number is rounded up to whole
        pages, so that more rows have equal numbers and can form one batch. A row's padding does not depend on other
        slots.
        """
        lengths = self.blocks.lengths[rows]  # [b, (L,) Hk]
        of_view = tuple(range(1, lengths.ndim))
        longest = lengths.max(axis=of_view).astype(np.int64)
        uneven = lengths.min(axis=of_view) < longest
        return np.where(uneven, -(-longest // PAGE) * PAGE, longest), uneven

    def filled(self, rows: np.ndarray) -> np.ndarray:
        return np.zeros_like(rows)

    def complete(self, batch: RowBatch, new: int) -> None:
        newest = torch.arange(-new, 0, device=self.device)
        places = self.blocks.lengths_on_device()[batch.at][..., None] + newest  # [b, Hk, new]
        at = self.blocks.at(batch.at, places).view(-1)
        positions = (batch.seen[:, None] + newest)[:, None].expand(places.shape)
        self.pool.positions.index_copy_(0, at, positions.reshape(-1).int())
        for spec in self.specs:
            self.pool.columns[spec.name].index_fill_(0, at, spec.init)

    def entries(self, batch: RowBatch, *, keys: bool = True, values: bool = True) -> Rows:
        shown, uneven = self.shown(batch.rows[None])
        at = self.blocks.first(batch.at, int(shown[0]))  # [b, Hk, n]
        valid = self._exists(batch, int(shown[0])) if uneven[0] else None

        def pick(x: torch.Tensor) -> torch.Tensor:
            return x.index_select(0, at.view(-1)).view(*at.shape, *x.shape[1:])

        columns = {name: pick(column) for name, column in self.pool.columns.items()}
        return Rows(
            keys=pick(self.pool.keys) if keys else placeholder(self.pool.keys, *at.shape),
            values=pick(self.pool.values) if values else placeholder(self.pool.values, *at.shape),
            positions=pick(self.pool.positions).long(),
            columns=columns,
            valid=valid,
        )

    def write_column(self, batch: RowBatch, name: str, value: torch.Tensor) -> None:
        at = torch.where(self._exists(batch, value.shape[-1]), self.blocks.first(batch.at, value.shape[-1]), 0)
        self.pool.columns[name].index_copy_(0, at.view(-1), value.reshape(-1))

    def compact(self, batch: RowBatch, keep: torch.Tensor) -> None:
        if batch.kernels:
            from kvbench.engine.cache.compaction_kernel import counted

            counts, moved = counted(keep)
        else:
            counts = keep.sum(dim=-1)
            moved = (keep & ~_front(keep, counts)).sum(dim=-1)
        self._cuts.append(Cut(batch, keep, counts, moved.amax().view(1)))

    def cuts(self) -> list[Cut]:
        """Return the eviction decisions (`Cut`) that `compact` has stored, and remove them from this stack."""
        cuts, self._cuts = self._cuts, []
        return cuts

    def carry_out(self, cut: Cut, counts: np.ndarray, movers: int) -> None:
        """Move the kept entries of a decision to the front of their heads, and free the pages behind them.

        counts: kept entries of each head; movers: the most entries that any head must move. Both are the host's copies
        of what `cut` has on the device.
        """
        if cut.batch.kernels:
            self._move_by_kernel(cut, movers)
        else:
            self._move(cut, movers)
        self.blocks.resize(cut.batch.rows, counts)

    def _move(self, cut: Cut, movers: int) -> None:
        """Move the kept entries of a decision to the front of their heads. movers: see `carry_out`."""
        front = _front(cut.keep, cut.counts)
        places = moves(front & ~cut.keep, cut.keep & ~front, movers)
        source, to = (torch.where(x < 0, 0, self.blocks.at(cut.batch.at, x.clamp(min=0))).view(-1) for x in places)
        copy_rows(self.pool.tensors(), source, to)

    def _move_by_kernel(self, cut: Cut, movers: int) -> None:
        """Do by Triton what `_move` does by PyTorch."""
        from kvbench.engine.cache.compaction_kernel import compact

        if movers:
            table = self.blocks.table_on_device()
            compact(cut.keep, movers, self.pool.tensors(), cut.batch.index, table.shape[2], table, PAGE)

    def _exists(self, batch: RowBatch, shown: int) -> torch.Tensor:
        """Return which of the first `shown` places of each head hold an entry, [b, Hk, shown] bool."""
        return torch.arange(shown, device=self.device) < self.blocks.lengths_on_device()[batch.at][..., None]


class PagedCache(SlotCache):
    stacks: list[PagedStack]

    def __init__(
        self, geometry: Sequence[LayerGeometry], shape: Shape, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(geometry, shape, device, dtype)
        kinds: dict[tuple[int, int, torch.device], list[LayerGeometry]] = {}
        for g in geometry:
            if g.evicts:
                kinds.setdefault((g.head_dim, g.value_dim, g.on(device)), []).append(g)
        self.pools = {
            kind: Pool(members[0], shape, 1 + pages(members, shape), kind[2], dtype) for kind, members in kinds.items()
        }
        self.stacks = []
        for members in alike(geometry):
            where = members[0].on(device)
            pool = self.pools[members[0].head_dim, members[0].value_dim, where]
            self.stacks.append(PagedStack(members, shape, pool, where, dtype))
        stores = {store.geometry.index: store for stack in self.stacks for store in stack.layers}
        self.layers = [stores.get(g.index) or RingStore(g, shape, g.on(device), dtype) for g in geometry]
        self._heads = sum(g.kv_heads for g in geometry if g.evicts)

    def make_room(self, ahead: Sequence[int]) -> None:
        for stack in self.stacks:
            stack.blocks.make_room(np.array(ahead))

    def advance(self, slots: Sequence[int]) -> None:
        super().advance(slots)
        for stack in self.stacks:
            stack.blocks.advance(slots)

    def clear(self, slot: int) -> None:
        super().clear(slot)
        for stack in self.stacks:
            stack.blocks.clear(stack.rows_of([slot]))

    def held(self, slot: int) -> float:
        return float(sum(stack.blocks.entries[slot] for stack in self.stacks)) / max(1, self._heads)

    def settle(self, sizes: Mapping[int, int]) -> None:
        """Drop the entries that the method's decisions (`Cut`) do not keep. `sizes` is not used. One copy from the
        device brings the numbers of kept entries and the results of delayed checks (`checks.read`)."""
        cuts = [(stack, cut) for stack in self.stacks for cut in stack.cuts()]
        if not cuts:
            return
        parts = (part for _, cut in cuts for part in (cut.movers, cut.counts.view(-1)))
        numbers = read(torch.cat([part.to(self.device) for part in parts])).numpy()
        first = 0
        for stack, cut in cuts:
            end = first + 1 + cut.counts.numel()
            stack.carry_out(cut, numbers[first + 1 : end].reshape(cut.counts.shape), int(numbers[first]))
            first = end

    def live_bytes(self, slot: int) -> int:
        used = sum(int(stack.blocks.used[slot]) * stack.pool.page_bytes for stack in self.stacks)
        return used + self.fixed_bytes(self.seen[slot])

    def extra_bytes(self, slot: int) -> int:
        beside = sum(int(stack.blocks.used[slot]) * stack.pool.page_extra for stack in self.stacks)
        return beside + self.stored_bytes

    def bytes(self) -> int:
        total = self.stored_bytes * self.slots
        total += sum(layer.bytes() for layer in self.layers if isinstance(layer, RingStore))
        return total + sum(t.nbytes for pool in self.pools.values() for t in pool.tensors())


def _front(keep: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return the mask [b, Hk, n] that marks the first `counts` [b, Hk] places of each head."""
    return torch.arange(keep.shape[-1], device=keep.device) < counts[..., None]
