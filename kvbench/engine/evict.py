"""Eviction: build a method's view, let it score, choose, and compact the cache in place. The only code that drops
entries.

Compaction is by hole filling: survivors in the first C rows stay, survivors behind them move into the holes. Traffic
is bounded by the entries added since the last eviction, not by the size of the cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kvbench.engine.cache import LayerStore, SlotCache
from kvbench.errors import UserError
from kvbench.eviction import noise, select
from kvbench.eviction.api import Method, Trigger
from kvbench.eviction.view import LayerView

KeptLog = Callable[[int, int, int, torch.Tensor], None]  # (noise key, tokens seen, layer, kept positions [Hk, C])


@contextlib.contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Score on one CPU thread: with more, the last bits of a batched product depend on which sequences are evicted
    together.
    """
    before = torch.get_num_threads()
    if device.type == "cpu" and before > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


@dataclass(slots=True)
class _Group:
    """Slots that hold equally many entries and are served together; what is the same for all layers is made once."""

    slots: list[int]
    length: int
    index: torch.Tensor  # [b] slots
    everyone: bool  # all slots of the cache in order: narrowed tensors serve without a copy
    seen: torch.Tensor  # [b]
    prompt_len: torch.Tensor
    evictions: torch.Tensor
    noise_key: torch.Tensor

    def valid(self, shape: torch.Size) -> torch.Tensor:
        """All entries are valid: a dense group has no padding. One expanded element, no memory."""
        return torch.ones(1, dtype=torch.bool, device=self.index.device).expand(shape)

    def pick(self, tensor: torch.Tensor) -> torch.Tensor:
        """The group's live rows of a cache tensor [S, Hk, P, ...]."""
        return tensor[:, :, : self.length] if self.everyone else tensor[self.index, :, : self.length]

    def put(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Write the group's live rows."""
        if self.everyone:
            tensor[:, :, : self.length] = values
        else:
            tensor[self.index, :, : self.length] = values


class Evictor:
    """Applies one method at one budget to a cache.

    Args:
        trigger: says which slots are full.
        cache: whose slots are evicted.
        log: called with what every eviction kept (the dense oracle of the tests replays it); None costs nothing.

    Raises:
        UserError: the method spreads its budget unevenly, which the dense layout cannot hold.
    """

    def __init__(
        self, method: Method, budget: int, trigger: Trigger, cache: SlotCache, log: KeptLog | None = None
    ) -> None:
        if method.scope != "head" or type(method).quotas is not Method.quotas:
            raise UserError(
                f"{type(method).__name__} spreads its budget unevenly over heads or layers and needs the paged layout."
            )
        self.method, self.budget, self.trigger, self.cache, self.log = method, budget, trigger, cache, log
        self.needs = method.needs()
        slots = cache.slots
        self.prompt_len = [0] * slots
        self.evictions = [0] * slots
        self.noise_key = [0] * slots
        self._known = [0] * slots  # rows whose positions and columns are written
        self._stores = [store for store in cache.layers if store.geometry.evicts]

    def start(self, slot: int, prompt_len: int, noise_key: int, evictions: int = 0) -> None:
        """A new sequence occupies `slot`; its rows so far carry positions and columns."""
        self.prompt_len[slot], self.noise_key[slot] = prompt_len, noise.signed64(noise_key)
        self.evictions[slot] = evictions
        self._known[slot] = self.cache.lengths[slot]

    def observe_block(self, layer: int, queries: torch.Tensor, start: int, rows: int) -> None:
        """Hand a block of prompt queries [b, Hq, t, D] at positions start.. to the method (needs "since_last")."""
        group = self._group(list(range(self.cache.slots)), rows)
        group.seen = torch.full_like(group.seen, rows)
        positions = torch.arange(start, start + queries.shape[2], device=queries.device).expand(len(group.slots), -1)
        self._observe(self.cache.layers[layer], group, queries, positions)

    def tick(self, slots: Sequence[int]) -> list[int]:
        """An interval of these slots has ended: observe, and evict where more than the budget is held.

        Returns the slots that were reduced.
        """
        if self.needs.queries == "since_last":
            for group in self._by_length(slots):
                for store in self._stores:
                    self._complete(store, group)
                    self._observe(store, group, *self._stored_queries(store, group))
                self._mark(group, group.length)
        return self.evict(slots)

    def evict(self, slots: Sequence[int]) -> list[int]:
        """Let the method decide about every given slot that its trigger calls full.

        Returns the slots that were reduced.
        """
        due = [s for s in slots if self.trigger.full(self.cache.lengths[s], self.budget)]
        for group in self._by_length(due):
            for store in self._stores:
                self._complete(store, group)
                self._reduce(store, group)
            self._mark(group, self.budget)
        reduced = [s for s in due if self.cache.lengths[s] > self.budget]
        for s in due:
            self.cache.lengths[s] = self.budget
            self.evictions[s] += 1
        return reduced

    def _by_length(self, slots: Sequence[int]) -> list[_Group]:
        """In a steady state all sequences hold equally many entries, so there is one group."""
        lengths = self.cache.lengths
        return [self._group([s for s in slots if lengths[s] == n], n) for n in sorted({lengths[s] for s in slots})]

    def _group(self, slots: list[int], length: int) -> _Group:
        def per_slot(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor([values[s] for s in slots], device=self.cache.device)

        return _Group(
            slots=slots,
            length=length,
            index=torch.tensor(slots, device=self.cache.device),
            everyone=slots == list(range(self.cache.slots)),
            seen=per_slot(self.cache.seen),
            prompt_len=per_slot(self.prompt_len),
            evictions=per_slot(self.evictions),
            noise_key=per_slot(self.noise_key),
        )

    def _mark(self, group: _Group, known: int) -> None:
        for s in group.slots:
            self._known[s] = known

    def _observe(self, store: LayerStore, group: _Group, queries: torch.Tensor, query_positions: torch.Tensor) -> None:
        view = self._view(store, group, queries, query_positions)
        for name, column in self.method.observe(view).items():
            group.put(store.columns[name], column)

    def _reduce(self, store: LayerStore, group: _Group) -> None:
        view = self._view(store, group, *self._stored_queries(store, group))
        keep, columns = select.decide(self.method, view)
        for name, column in columns.items():
            group.put(store.columns[name], column)
        if self.log is not None:
            for i, s in enumerate(group.slots):
                kept = view.positions[i][keep[i]].view(keep.shape[1], -1)
                self.log(self.noise_key[s], self.cache.seen[s], store.geometry.index, kept)
        self._compact(store, group.index, keep)

    def _complete(self, store: LayerStore, group: _Group) -> None:
        """Write positions and initial columns of the rows appended since the last tick."""
        assert store.positions is not None
        for known in sorted({self._known[s] for s in group.slots}):
            some = [i for i, s in enumerate(group.slots) if self._known[s] == known]
            whole = len(some) == len(group.slots)
            seen = group.seen if whole else group.seen[some]
            at: torch.Tensor | slice = group.index[some]
            if whole:
                at = slice(None) if group.everyone else group.index
            ages = torch.arange(group.length - known, 0, -1, device=seen.device)
            store.positions[at, :, known : group.length] = (seen[:, None] - ages).int()[:, None, :]
            for spec in self.cache.column_specs:
                store.columns[spec.name][at, :, known : group.length] = spec.init

    def _stored_queries(self, store: LayerStore, group: _Group) -> tuple[torch.Tensor, torch.Tensor]:
        """The newest queries [b, Hq, w, D] oldest first, and their positions [b, w]."""
        width, heads, dim = self.cache.query_rows, store.geometry.query_heads, store.geometry.head_dim
        b = len(group.slots)
        if store.queries is None:
            return store.keys.new_zeros(b, heads, 0, dim), group.seen.new_zeros(b, 0)
        positions = group.seen[:, None] - width + torch.arange(width, device=group.seen.device)
        base = (group.index[:, None] * heads + torch.arange(heads, device=group.index.device)) * width  # [b, Hq]
        rows = base[:, :, None] + (positions % width)[:, None, :]
        return store.queries.view(-1, dim).index_select(0, rows.view(-1)).view(b, heads, width, dim), positions

    def _view(
        self, store: LayerStore, group: _Group, queries: torch.Tensor, query_positions: torch.Tensor
    ) -> LayerView:
        g = store.geometry
        assert store.positions is not None
        positions = group.pick(store.positions).long()
        return LayerView(
            layer=g.index,
            keys=group.pick(store.keys),
            values=group.pick(store.values) if self.needs.values else None,
            positions=positions,
            valid=group.valid(positions.shape),
            whole=True,
            queries=queries,
            query_positions=query_positions,
            columns={name: group.pick(column) for name, column in store.columns.items()},
            seen=group.seen,
            prompt_len=group.prompt_len,
            eviction_index=group.evictions,
            noise_key=group.noise_key,
            budget=self.budget,
            scaling=g.scaling,
            softcap=g.softcap,
        )

    def _compact(self, store: LayerStore, index: torch.Tensor, keep: torch.Tensor) -> None:
        """Move survivors behind row `budget` into the holes before it.

        keep: [b, Hk, n] bool with `budget` set per head.
        """
        budget, heads = self.budget, store.geometry.kv_heads
        holes = (~keep[..., :budget]).nonzero()  # [m, 3] (sequence, head, row), as many as there are movers,
        movers = keep[..., budget:].nonzero()  # and in the same (sequence, head) order
        base = (index[holes[:, 0]] * heads + holes[:, 1]) * store.capacity
        to, source = base + holes[:, 2], base + budget + movers[:, 2]
        rows = [store.keys.view(-1, store.geometry.head_dim), store.values.view(-1, store.geometry.value_dim)]
        assert store.positions is not None
        flat = [store.positions.view(-1), *(c.view(-1) for c in store.columns.values())]
        for tensor in rows + flat:
            tensor.index_copy_(0, to, tensor.index_select(0, source))
