"""Eviction: build a method's view, let it score, choose, and compact the cache in place. The only code that drops
entries.

Compaction is by hole filling: survivors in the first C rows stay, survivors behind them move into the holes. Traffic
is bounded by the entries added since the last eviction, not by the size of the cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

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


class Evictor:
    """Applies one method at one budget to a cache.

    Args:
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
        self.method, self.budget, self.cache, self.log = method, budget, cache, log
        self.needs, self.trigger = method.needs(), trigger
        slots = cache.slots
        self.prompt_len = [0] * slots
        self.evictions = [0] * slots
        self.noise_key = [0] * slots
        self._known = [0] * slots  # rows whose positions and columns are written

    def start(self, slot: int, prompt_len: int, noise_key: int, evictions: int = 0) -> None:
        """A new sequence occupies `slot`; its rows so far carry positions and columns."""
        self.prompt_len[slot], self.noise_key[slot] = prompt_len, noise.signed64(noise_key)
        self.evictions[slot] = evictions
        self._known[slot] = self.cache.lengths[slot]

    def observe_block(self, layer: int, queries: torch.Tensor, start: int, rows: int) -> None:
        """Hand a block of prompt queries [b, Hq, t, D] at positions start.. to the method (needs "since_last")."""
        store = self.cache.layers[layer]
        slots = list(range(self.cache.slots))
        positions = torch.arange(start, start + queries.shape[2], device=queries.device).expand(len(slots), -1)
        view = self._view(store, slots, rows, queries, positions, seen=rows)
        for name, column in self.method.observe(view).items():
            store.columns[name][:, :, :rows] = column

    def tick(self, slots: Sequence[int]) -> list[int]:
        """An interval of these slots has ended: observe, and evict where more than the budget is held.

        Returns those slots.
        """
        if self.needs.queries == "since_last":
            for group, length in self._by_length(slots):
                for store in self._stores():
                    self._complete(store, group, length)
                    self._observe(store, group, length)
                self._mark(group, length)
        return self.evict(slots)

    def evict(self, slots: Sequence[int]) -> list[int]:
        """Let the method decide about every given slot that its trigger calls full.

        Returns the slots that were reduced.
        """
        due = [s for s in slots if self.trigger.full(self.cache.lengths[s], self.budget)]
        for group, length in self._by_length(due):
            for store in self._stores():
                self._complete(store, group, length)
                self._reduce(store, group, length)
            self._mark(group, self.budget)
        reduced = [s for s in due if self.cache.lengths[s] > self.budget]
        for s in due:
            self.cache.lengths[s] = self.budget
            self.evictions[s] += 1
        return reduced

    def _stores(self) -> list[LayerStore]:
        return [store for store in self.cache.layers if store.geometry.evicts]

    def _by_length(self, slots: Sequence[int]) -> list[tuple[list[int], int]]:
        """Slots that hold equally many entries are served together; in a steady state that is all of them."""
        lengths = self.cache.lengths
        return [([s for s in slots if lengths[s] == n], n) for n in sorted({lengths[s] for s in slots})]

    def _mark(self, slots: Sequence[int], known: int) -> None:
        for s in slots:
            self._known[s] = known

    def _observe(self, store: LayerStore, slots: list[int], length: int) -> None:
        view = self._view(store, slots, length, *self._stored_queries(store, slots))
        index = torch.tensor(slots, device=self.cache.device)
        for name, column in self.method.observe(view).items():
            store.columns[name][index, :, :length] = column

    def _reduce(self, store: LayerStore, slots: list[int], length: int) -> None:
        view = self._view(store, slots, length, *self._stored_queries(store, slots))
        index = torch.tensor(slots, device=self.cache.device)
        keep, columns = select.decide(self.method, view)
        for name, column in columns.items():
            store.columns[name][index, :, :length] = column
        if self.log is not None:
            for i, s in enumerate(slots):
                kept = view.positions[i][keep[i]].view(keep.shape[1], -1)
                self.log(self.noise_key[s], self.cache.seen[s], store.geometry.index, kept)
        self._compact(store, index, keep)

    def _complete(self, store: LayerStore, slots: list[int], length: int) -> None:
        """Write positions and initial columns of the rows appended since the last tick."""
        assert store.positions is not None
        for known in sorted({self._known[s] for s in slots}):
            group = [s for s in slots if self._known[s] == known]
            index = torch.tensor(group, device=self.cache.device)
            seen = torch.tensor([self.cache.seen[s] for s in group], device=self.cache.device, dtype=torch.int32)
            ages = torch.arange(length - known, 0, -1, device=self.cache.device, dtype=torch.int32)
            store.positions[index, :, known:length] = (seen[:, None] - ages[None])[:, None, :]
            for spec in self.cache.column_specs:
                store.columns[spec.name][index, :, known:length] = spec.init

    def _stored_queries(self, store: LayerStore, slots: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The newest queries [b, Hq, w, D] oldest first, and their positions [b, w]."""
        device, width = self.cache.device, self.cache.query_rows
        seen = torch.tensor([self.cache.seen[s] for s in slots], device=device)
        if store.queries is None:
            empty = store.keys.new_zeros(len(slots), store.geometry.query_heads, 0, store.geometry.head_dim)
            return empty, seen.new_zeros(len(slots), 0)
        positions = seen[:, None] - width + torch.arange(width, device=device)[None]
        index = torch.tensor(slots, device=device)
        rows = (positions % width)[:, None, :, None].expand(-1, store.geometry.query_heads, -1, store.geometry.head_dim)
        return store.queries[index].gather(2, rows), positions

    def _view(
        self,
        store: LayerStore,
        slots: list[int],
        length: int,
        queries: torch.Tensor,
        query_positions: torch.Tensor,
        seen: int | None = None,
    ) -> LayerView:
        device = self.cache.device
        everyone = slots == list(range(self.cache.slots))  # then a narrowed tensor serves without a copy
        index: torch.Tensor | slice = slice(None) if everyone else torch.tensor(slots, device=device)

        def pick(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[index, :, :length]

        def per_slot(values: list[int]) -> torch.Tensor:
            return torch.tensor([values[s] for s in slots], device=device)

        g = store.geometry
        assert store.positions is not None
        positions = pick(store.positions).long()
        return LayerView(
            layer=g.index,
            keys=pick(store.keys),
            values=pick(store.values),
            positions=positions,
            valid=torch.ones_like(positions, dtype=torch.bool),
            queries=queries,
            query_positions=query_positions,
            columns={name: pick(column) for name, column in store.columns.items()},
            seen=per_slot(self.cache.seen) if seen is None else torch.full((len(slots),), seen, device=device),
            prompt_len=per_slot(self.prompt_len),
            eviction_index=per_slot(self.evictions),
            noise_key=per_slot(self.noise_key),
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
