"""Evictions while decoding: at a slot's tick the method decides which entries stay, and the cache drops the others.

`cache.prompt.PromptCache` evicts while a prompt is read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from kvbench.engine.cache.slot_cache import EvictingStore, SlotBatch, SlotCache
from kvbench.engine.rules import KeptLog, Rules, allowed, check_held
from kvbench.eviction import noise, select
from kvbench.eviction.view import LayerView


@contextlib.contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Run the block on one CPU thread: with more threads, the scores' last bits depend on the sequences of a batch."""
    before = torch.get_num_threads()
    if device.type == "cpu" and before > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


class Evictor:
    """Applies one method to the sequences of a cache.

    Args:
        rules: the method with its weights. Their budget is ignored, because `start` sets the budget of each sequence.
        log: receives the kept positions of every eviction.
    """

    def __init__(self, rules: Rules, cache: SlotCache, log: KeptLog | None = None) -> None:
        self.rules, self.cache, self.log = rules.decoding(), cache, log
        self.method = self.rules.method
        self.trigger = self.method.trigger(rules.interval)
        self.needs = self.method.needs()
        self._fresh = min(self.trigger.growth or 0, cache.shape.queries)  # queries since the previous tick
        slots = cache.slots
        self.budget: list[int | None] = [None] * slots
        self.prompt_len = [0] * slots
        self.evictions = [0] * slots
        self.noise_key = [0] * slots
        self._batches_of_tick: dict[tuple[tuple[int, ...], int], SlotBatch] = {}  # shared by its layers
        self._ordinals = {store.geometry.index: i for i, store in enumerate(cache.evicting)}

    def start(self, slot: int, budget: int | None, prompt_len: int, noise_key: int, evictions: int = 0) -> None:
        """Register a new sequence in `slot`, with its budget, prompt length and evictions so far."""
        self.budget[slot], self.prompt_len[slot] = budget, prompt_len
        self.noise_key[slot], self.evictions[slot] = noise.signed64(noise_key), evictions

    def tick(self, slots: Sequence[int]) -> list[int]:
        """Let the method observe these slots, whose interval has ended, and evict those that hold too many entries.

        Return the slots that lost entries.
        """
        stores = self.cache.evicting
        self._batches_of_tick.clear()
        if self.needs.queries == "since_last":
            for store in stores:
                for batch in self._batches(slots, [store], dict.fromkeys(slots, 0)):
                    store.complete(batch)
                    self._update(store, batch, self.method.observe(self._view(store, batch, self._fresh)))
        held, sizes = {s: self.cache.held(s) for s in slots}, {s: self._allowed(s) for s in slots}
        due = [s for s in slots if self.trigger.full(held[s], sizes[s])]
        for group in [[store] for store in stores] if self.method.layerwise else [stores]:
            for batch in self._batches(due, group, sizes):
                self._reduce(group, batch)
        self.cache.settle(due)
        for s in due:
            self.evictions[s] += 1
            check_held(self.cache.held(s), sizes[s])  # the method may have decided layer by layer
        return [s for s in due if self.cache.held(s) < held[s]]

    def _allowed(self, slot: int) -> int:
        seen = self.cache.seen[slot]
        return allowed(self.method, self.budget[slot], self.prompt_len[slot], seen, self.evictions[slot])

    def _batches(self, slots: Sequence[int], stores: Sequence[EvictingStore], sizes: dict[int, int]) -> list[SlotBatch]:
        """Group slots that one view can show together and that may keep equally many entries."""
        batches = []
        for group in self.cache.batches(slots, stores):
            for size in sorted({sizes[s] for s in group}):
                key = tuple(s for s in group if sizes[s] == size), size
                if key not in self._batches_of_tick:
                    self._batches_of_tick[key] = self._batch(list(key[0]), size)
                batches.append(self._batches_of_tick[key])
        return batches

    def _batch(self, slots: list[int], allowed: int) -> SlotBatch:
        def per_slot(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor([values[s] for s in slots], device=self.cache.device)

        return SlotBatch(
            slots=slots,
            index=torch.tensor(slots, device=self.cache.device),
            all_slots=slots == list(range(self.cache.slots)),
            seen=per_slot(self.cache.seen),
            prompt_len=per_slot(self.prompt_len),
            evictions=per_slot(self.evictions),
            noise_key=per_slot(self.noise_key),
            allowed=allowed,
        )

    def _reduce(self, stores: Sequence[EvictingStore], batch: SlotBatch) -> None:
        for store in stores:
            store.complete(batch)
        views = [self._view(store, batch, self.needs.width) for store in stores]
        for store, view, verdict in zip(stores, views, select.decide(self.method, views)):
            self._update(store, batch, verdict.columns)
            if self.log is not None:
                for i, s in enumerate(batch.slots):
                    kept = [p[k] for p, k in zip(view.positions[i], verdict.keep[i])]
                    self.log(self.noise_key[s], self.cache.seen[s], store.geometry.index, kept)
            store.compact(batch, verdict.keep)

    def _update(self, store: EvictingStore, batch: SlotBatch, values: dict[str, torch.Tensor]) -> None:
        for name, value in values.items():
            if name in store.states:
                store.states[name][batch.index] = value
            else:
                store.write(batch, name, value)

    def _view(self, store: EvictingStore, batch: SlotBatch, width: int) -> LayerView:
        queries, query_positions = store.newest_queries(batch, width)
        return self.rules.view(
            store.geometry,
            self._ordinals,
            store.rows(batch),
            batch,
            queries=queries,
            query_positions=query_positions,
            states={name: state[batch.index] for name, state in store.states.items()},
        )
