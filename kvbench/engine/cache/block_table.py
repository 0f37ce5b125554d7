"""`BlockTable`: which pages of a pool belong to which head, and how many entries each head holds.

The host allocates memory, so its arrays are authoritative. The device has a copy of the tables and the lengths; if the
device is a CPU, it reads the host's arrays instead. A step changes few elements of a table, and only these are copied
to the device (the whole table when it was made wider). The lengths are few numbers, so all of them are copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvbench.engine.cache.pool import PAGE, Pool
from kvbench.engine.upload import upload


class BlockTable:
    """Block tables [rows, Hk, W] and lengths [rows, Hk] of a stack. A row is one layer of one slot (see `stack`).

    Letters: b rows of a call; Hk KV heads; W pages per head for which the table has room. lengths, pages: how many
    entries and how many pages each head has. entries: how many entries each slot has in all its layers and heads; used:
    how many pages these entries fill, without pages allocated for later entries.
    """

    def __init__(self, pool: Pool, rows: int, slots: int, heads: int, expected: int, device: torch.device) -> None:
        self.pool, self.slots, self.device = pool, slots, device
        self.lengths = np.zeros((rows, heads), dtype=np.int32)
        self.pages = np.zeros((rows, heads), dtype=np.int32)
        self.table = np.zeros((rows, heads, -(-expected // PAGE) + 1), dtype=np.int32)
        self.used, self.entries = np.zeros(slots, dtype=np.int64), np.zeros(slots, dtype=np.int64)
        self._lengths: torch.Tensor | None = None  # on the device, if up to date
        self._table: torch.Tensor | None = None
        self._changed: list[np.ndarray] = []  # indices into the flat table, not yet copied to the device

    def resize(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        """Set how many entries the heads of these rows hold, and give each head only the pages that its entries fill.
        lengths: [b, Hk], the new numbers of entries."""
        self.reserve(rows, lengths)
        before, slots = self.lengths[rows], rows % self.slots
        np.add.at(self.entries, slots, (lengths - before).sum(axis=1))
        np.add.at(self.used, slots, (-(-lengths // PAGE) - -(-before // PAGE)).sum(axis=1))
        self.lengths[rows] = lengths
        self._lengths = None

    def reserve(self, rows: np.ndarray, lengths: np.ndarray) -> None:
        """Allocate and free pages so that each head of these rows has exactly the pages for its number in `lengths`.
        lengths: [b, Hk], numbers of entries, which may be larger than the numbers that the heads hold now."""
        wanted, width = -(-lengths // PAGE), self.table.shape[2]
        if (most := int(wanted.max(initial=0))) > width:
            self.table = np.pad(self.table, ((0, 0), (0, 0), (0, max(most, 2 * width) - width)))
            self._table, self._changed = None, []
        row, head = np.nonzero(wanted != self.pages[rows])
        if not row.size:
            return
        want, had = wanted[row, head], self.pages[rows[row], head]  # [m]
        row = rows[row]
        owner, place = _listed(np.abs(want - had))
        at = np.ravel_multi_index((row[owner], head[owner], np.minimum(want, had)[owner] + place), self.table.shape)
        grows, table = (want > had)[owner], self.table.reshape(-1)
        freed, added = at[~grows], at[grows]
        taken = self.pool.take(max(0, len(added) - len(freed)))  # freed pages are reused
        spare = np.concatenate([np.array(taken, dtype=np.int32), table[freed]])
        self.pool.give_back(spare[len(added) :])
        table[freed], table[added] = 0, spare[: len(added)]
        self.pages[row, head] = want
        self._changed.append(at)

    def make_room(self, ahead: np.ndarray) -> None:
        """Allocate pages so that every head has room for the next entries of its slot. ahead: for each slot, how many
        entries a head may gain."""
        room, wanted = self.pages * PAGE, self.lengths + np.resize(ahead, len(self.lengths))[:, None]
        short = np.nonzero((wanted > room).any(axis=1))[0]
        if short.size:
            self.reserve(short, np.maximum(wanted[short], room[short]))

    def advance(self, slots: Sequence[int]) -> None:
        """Count one more entry in every head of these slots."""
        by_layer = self.lengths.reshape(-1, self.slots, self.lengths.shape[1])
        self.used[list(slots)] += (by_layer[:, list(slots)] % PAGE == 0).sum(axis=(0, 2))
        by_layer[:, list(slots)] += 1
        self.entries[list(slots)] += by_layer.shape[0] * by_layer.shape[2]
        self._lengths = None

    def clear(self, rows: np.ndarray) -> None:
        self.resize(rows, np.zeros((len(rows), self.lengths.shape[1]), dtype=np.int32))

    def lengths_on_device(self) -> torch.Tensor:
        """Return the lengths on the device, [rows, Hk] int32."""
        if self._lengths is None:
            self._lengths = upload(self.lengths if self._shared else self.lengths.copy(), self.device)
        return self._lengths

    def table_on_device(self) -> torch.Tensor:
        """Return the block tables on the device, [rows, Hk, W] int32."""
        if self._table is None:
            self._table = upload(self.table if self._shared else self.table.copy(), self.device)
        elif self._changed and not self._shared:
            places = np.unique(np.concatenate(self._changed))
            at, page = upload(np.stack([places, self.table.ravel()[places]]), self.device).unbind()
            self._table.view(-1).index_copy_(0, at, page.int())
        self._changed.clear()
        return self._table

    def at(self, rows: slice | torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the pool's indices, int64, of the entries at `places` [b, Hk, n] in the heads of these rows."""
        page = self.table_on_device()[rows].gather(-1, (places // PAGE).long())
        return page.long() * PAGE + places % PAGE

    def first(self, rows: slice | torch.Tensor, count: int) -> torch.Tensor:
        """Return the pool's indices [b, Hk, count], int64, of the first `count` entries in each head of these rows."""
        page = self.table_on_device()[rows][..., : -(-count // PAGE)].long()
        within = torch.arange(PAGE, device=self.device)
        return (page[..., None] * PAGE + within).flatten(-2)[..., :count].contiguous()

    def live(self, rows: np.ndarray) -> torch.Tensor:
        """Return the pool's indices [b, n], int64, of the n entries of each row, ordered by head and place. Different
        heads of a row may hold different numbers of entries, but each head holds the same number in all rows."""
        head, place = upload(np.stack(_listed(self.lengths[rows[0]])), self.device).unbind()
        page = self.table_on_device()[upload(rows, self.device)[:, None], head, place // PAGE]
        return page.long() * PAGE + place % PAGE

    @property
    def _shared(self) -> bool:
        """Whether host and device are the same memory."""
        return self.device.type == "cpu"


def _listed(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays with an element for each place: its owner, and its number among the places of this owner.
    counts: [m], how many places each owner has; numbers begin at 0. Both arrays are int64 and ordered by owner."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (counts.cumsum() - counts)[owner]
