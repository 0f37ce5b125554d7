"""`Stack`: all evicted layers of one geometry, on one device, in common tensors, so that one view can show them all.

Axis 0 of the tensors runs over rows. A row is one layer of one slot: row i * slots + s is slot s in the i-th layer of
the stack. Decode steps read and write one layer, through its `EvictingStore`; evictions read and write rows.

Letters: b rows of a batch, Hq query heads, Hk KV heads, n entries per head, D head dimension.
"""

from __future__ import annotations

import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvbench.engine import memory
from kvbench.engine.attention.geometry import LayerGeometry
from kvbench.engine.cache.slot_cache import EvictingStore, Shape
from kvbench.engine.rules import Batch, Rows
from kvbench.engine.upload import upload
from kvbench.eviction.api import Needs

SCRATCH_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}
SCRATCH_SHARE = 32  # scratch is also at most 1 / SCRATCH_SHARE of the memory
COPIES = 2  # how many float32 copies of the keys (or of the values) a method's code is assumed to hold at once
BESIDE = 32  # float32 numbers per entry and head that a decision takes beside keys and values: scores, order, masks


@dataclass(slots=True, kw_only=True)
class RowBatch(Batch):
    """Rows of a stack (each one layer of one slot) that a method decides about together. Tensors are [b]."""

    rows: np.ndarray  # [b] on the host, ascending
    index: torch.Tensor  # [b] `rows` on the device
    at: slice | torch.Tensor  # `index`, or a slice if the rows are consecutive: indexing by a slice copies nothing
    kernels: bool = False  # whether compaction may run Triton kernels, see `Rules`


class Stack(ABC):
    """Data of all evicted layers of one kind (`LayerGeometry.kind`): their entries, their newest queries and the
    method's states."""

    layers: Sequence[EvictingStore]

    def __init__(
        self, members: Sequence[LayerGeometry], shape: Shape, device: torch.device, dtype: torch.dtype
    ) -> None:
        g = self.geometry = members[0]
        self.members, self.slots, self.device = tuple(members), shape.slots, device
        rows = len(members) * shape.slots
        # The query and the hidden state of position p lie at p % width; width: the size of axis 2.
        self.queries = torch.zeros(rows, g.query_heads, shape.queries, g.head_dim, device=device, dtype=dtype)
        self.hidden = torch.zeros(rows, 1, shape.hidden, g.hidden, device=device, dtype=dtype)
        self.states = {s.name: torch.zeros(rows, *g.state_shape(s), device=device) for s in shape.states}
        self._indices = np.array([member.index for member in members])
        # [rows, Hk, g, places] float32: the attention that the g query heads of each group have paid to every entry
        # since the row's last mark or, before the first mark, since its last tick. older [marks, rows, Hk, g, places]:
        # the sums before each mark. None unless decode steps sum attention, see `mark`.
        self.sums: torch.Tensor | None = None
        self.older: torch.Tensor | None = None
        self.marks = shape.marks

    def rows_of(self, slots: Sequence[int]) -> np.ndarray:
        """Return the rows of these slots in all layers of the stack."""
        return (np.arange(len(self.members))[:, None] * self.slots + np.sort(np.array(slots, dtype=np.int64))).ravel()

    def layer_indices(self, rows: np.ndarray) -> np.ndarray:
        """Return the index of each row's layer, as in `LayerGeometry.index`."""
        return self._indices[rows // self.slots]

    def of_layer(self, place: int) -> slice:
        """Return the rows of all slots in the layer `members[place]`."""
        return slice(place * self.slots, (place + 1) * self.slots)

    def at_once(self, needs: Needs, entries: int, queries: int, *, kernels: bool) -> int:
        """Return how many rows one view may have so that its scratch fits `scratch_bytes`, see `stack.at_once`."""
        sizes = dict(entries=entries, queries=queries, element=self.queries.element_size())
        scratch = scratch_bytes(self.device, memory.total(self.device))
        return at_once(self.geometry, needs, scratch, **sizes, kernels=kernels)

    def newest_queries(self, batch: RowBatch, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the newest `count` queries [b, Hq, count, D], oldest first, and their positions [b, count]."""
        return _newest(self.queries, batch, count)

    def newest_hidden(self, batch: RowBatch, count: int) -> torch.Tensor | None:
        """Return the hidden states of the newest `count` tokens [b, count, hidden size], oldest first; None for 0."""
        return _newest(self.hidden, batch, count)[0][:, 0] if count else None

    def sums_of(self, batch: RowBatch) -> torch.Tensor | None:
        """Return the attention that the rows' entries have received since the last tick, [b, Hk, g, n] float32, or None
        if decode steps do not sum it."""
        if self.sums is None:
            return None
        length = int(self.filled(batch.rows[:1])[0])
        return functools.reduce(torch.add, self._series(batch, length))

    def newest_sums_of(self, batch: RowBatch) -> dict[int, torch.Tensor]:
        """Return, by each number of steps in `marks`, the attention that the rows' entries have received since this
        mark, [b, Hk, g, n] float32; {} without marks. At a tick, this number is also the number of queries since the
        mark."""
        if not self.marks:
            return {}
        _, *series = self._series(batch, int(self.filled(batch.rows[:1])[0]))
        return dict(zip(reversed(self.marks), itertools.accumulate(reversed(series), torch.add)))

    def mark(self, slots: Sequence[int], number: int) -> None:
        """Begin new sums in these slots; the sums so far become `older[number]`. number: the index in `marks`."""
        assert self.sums is not None
        assert self.older is not None
        at = self._at(slots)
        self.older[number, at] = self.sums[at]
        self.sums[at] = 0

    def clear_sums(self, slots: Sequence[int]) -> None:
        """Begin new sums in these slots after a tick."""
        if self.sums is not None:
            self.sums[self._at(slots)] = 0
        if self.older is not None:
            self.older[:, self._at(slots)] = 0

    def _at(self, slots: Sequence[int]) -> slice | torch.Tensor:
        """Return the index of these slots' rows; a slice if the rows are consecutive, see `RowBatch.at`."""
        rows = self.rows_of(slots)
        return slice(rows[0], rows[-1] + 1) if rows[-1] - rows[0] == len(rows) - 1 else upload(rows, self.device)

    def _series(self, batch: RowBatch, length: int) -> list[torch.Tensor]:
        """Return the rows' sums between successive marks, oldest first, each [b, Hk, g, length]."""
        assert self.sums is not None
        every = [self.sums] if self.older is None else [*self.older, self.sums]
        return [sums[batch.at, :, :, :length] for sums in every]

    def states_of(self, batch: RowBatch) -> dict[str, torch.Tensor]:
        return {name: state[batch.at] for name, state in self.states.items()}

    def write(self, batch: RowBatch, values: dict[str, torch.Tensor]) -> None:
        """Store new values by name: columns [b, Hk, n] and states [b, ...]."""
        for name, value in values.items():
            if name in self.states:
                self.states[name][batch.at] = value
            else:
                self.write_column(batch, name, value)

    @abstractmethod
    def shown(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each of b views, how many places per head it shows, and whether some of its heads have fewer
        entries; both [b]. rows: [b], one row per view; or [b, L], L rows per view, padded to equally many places."""

    @abstractmethod
    def filled(self, rows: np.ndarray) -> np.ndarray:
        """Return a number per row, [b]. One call of `complete` takes only rows with equal numbers. In a dense cache the
        number is the row's entries per head. In a paged cache it is 0 for every row."""

    @abstractmethod
    def complete(self, batch: RowBatch, new: int) -> None:
        """Write the positions and initial column values of the newest `new` entries in each head of these rows."""

    @abstractmethod
    def entries(self, batch: RowBatch, *, keys: bool = True, values: bool = True) -> Rows:
        """Return the entries of the batch's rows, with their columns. keys, values: whether to read K and V; the result
        holds NaN in place of what is not read."""

    @abstractmethod
    def write_column(self, batch: RowBatch, name: str, value: torch.Tensor) -> None:
        """Write new values [b, Hk, n] of the column `name`."""

    @abstractmethod
    def compact(self, batch: RowBatch, keep: torch.Tensor) -> None:
        """Drop the entries that the mask `keep` [b, Hk, n] does not mark. `SlotCache.settle` finishes the eviction."""


def _newest(ring: torch.Tensor, batch: RowBatch, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the newest `count` vectors [b, heads, count, D] of the batch's rows, and their positions [b, count]. The
    vectors come from a ring [rows, heads, width, D], oldest first."""
    _, heads, width, dim = ring.shape
    positions = batch.seen[:, None] - count + torch.arange(count, device=batch.seen.device)
    if count == 0:
        return ring.new_zeros(len(batch.rows), heads, 0, dim), positions
    base = (batch.index[:, None] * heads + torch.arange(heads, device=batch.index.device)) * width  # [b, heads]
    rows = base[:, :, None] + (positions % width)[:, None, :]
    return ring.view(-1, dim).index_select(0, rows.view(-1)).view(len(rows), heads, count, dim), positions


def at_once(
    g: LayerGeometry,
    needs: Needs,
    scratch: int,
    *,
    entries: int,
    queries: int,
    element: int,
    kernels: bool,
) -> int:
    """Return how many rows (each a layer of a slot) one view may have so that its scratch fits `scratch` bytes.

    At least 1, even if one row does not fit.

    Args:
        g: the geometry of the layers; needs: what the method reads.
        entries: entries per head of a row; queries: number of newest queries in the view; element: bytes of a number
            of K and V.
        kernels: see `Rules`. Triton kernels copy no keys. For each entry and query, they store at most one number per
            KV head, instead of a logit per query head.

    The view's copy of the entries is counted, although a dense cache shows consecutive rows without a copy.
    """
    keys = needs.keys or (queries > 0 and not kernels)
    head = 4 * (BESIDE + COPIES * (keys * g.head_dim + needs.values * g.read_dim))
    head += element * (shows_keys(needs, queries) * g.head_dim + needs.values * g.value_dim)
    rows = g.kv_heads if kernels else g.query_heads
    return max(1, scratch // (max(1, entries) * (g.kv_heads * head + 4 * rows * queries)))


def shows_keys(needs: Needs, queries: int) -> bool:
    """Return whether a view with this many queries shows keys. In latent attention, values are read from keys."""
    return needs.keys or needs.values or queries > 0


def placeholder(x: torch.Tensor, *size: int) -> torch.Tensor:
    """Return NaN [*size, D], in place of entries of x [..., D] that are not read; it takes the memory of one number."""
    return x.new_full((1,), torch.nan).expand(*size, x.shape[-1])


def scratch_bytes(device: torch.device, total: int) -> int:
    """Return the bytes of scratch that one view of an eviction may take, on a device with `total` bytes of memory. Rows
    that need more scratch are divided among several views; no decision depends on this division."""
    return min(SCRATCH_BYTES[device.type], total // SCRATCH_SHARE)


def alike(geometry: Sequence[LayerGeometry]) -> Iterator[list[LayerGeometry]]:
    """Yield groups of evicted layers of one kind (`LayerGeometry.kind`)."""
    kinds: dict[LayerGeometry, list[LayerGeometry]] = {}
    for g in geometry:
        if g.evicts:
            kinds.setdefault(g.kind, []).append(g)
    yield from kinds.values()


def moves(holes: torch.Tensor, movers: torch.Tensor, places: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pair a head's kept entries that must move (movers) with its places that become free (holes).

    The first mover is paired with the first hole, the second with the second, and so on.

    holes, movers: masks [b, Hk, n] bool, each with its own n. places: an upper bound on the movers of a head. Returns
    two tensors [b, Hk, places]: the indices of the movers, and the indices of the holes to which they move. Both have
    -1 after a head's last pair.
    """

    def listed(mask: torch.Tensor) -> torch.Tensor:
        n = mask.shape[-1]
        found = torch.full((*mask.shape[:2], 1 + max(n, places)), -1, device=mask.device)
        rank = mask.cumsum(dim=-1).mul_(mask)  # unmarked entries get 0, which is cut off below
        return found.scatter_(-1, rank, torch.arange(n, device=mask.device).expand(mask.shape))[..., 1 : 1 + places]

    source, target = listed(movers), listed(holes)
    paired = (source >= 0) & (target >= 0)
    return torch.where(paired, source, -1), torch.where(paired, target, -1)


def copy_rows(tensors: Sequence[torch.Tensor], source: torch.Tensor, to: torch.Tensor) -> None:
    """Copy the rows `source` [n] of each tensor [rows] or [rows, D] to its rows `to` [n]; no index is negative. All
    rows are read before any is written. A row may be written several times if its sources are equal."""
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.dim() == 2 and tensor.numel():
            # To numpy a row is one item, which it copies about 1.5 times as fast as torch copies D numbers.
            items = tensor.view(torch.uint8).numpy().view(f"V{tensor[0].nbytes}")[:, 0]
            items[to.numpy()] = items[source.numpy()]
        else:
            tensor.index_copy_(0, to, tensor.index_select(0, source))
