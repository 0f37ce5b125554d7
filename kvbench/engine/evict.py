"""Evictions while decoding: at a slot's tick the method decides which entries stay, and the cache drops the others.

A view shows a method entries of one or several slots. How many layers it shows depends on the method:

- not `stacked`: one layer.
- `stacked`, and decides about each layer alone: one or several layers, all with equally many entries.
- `stacked`, and decides about all layers together: all layers, padded to one length. If the layers do not fit into
  one view, or differ in more than their index, the method gets one view per layer, all in one call.

Decisions do not depend on which slots share a view. `cache.prompt.PromptCache` evicts while a prompt is read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvbench.engine.cache.slot_cache import SlotCache
from kvbench.engine.cache.stack import RowBatch, Stack, shows_keys
from kvbench.engine.images import kept_shares
from kvbench.engine.rules import KeptLog, Rules, allowed, check_held
from kvbench.engine.upload import upload
from kvbench.eviction import noise, select
from kvbench.eviction.checks import gathered
from kvbench.eviction.returned import observed
from kvbench.eviction.view import LayerView

Part = tuple[Stack, RowBatch]


@contextlib.contextmanager
def one_thread(device: torch.device) -> Iterator[None]:
    """Let torch use one thread inside the `with` block if the device is a CPU. With more threads, the last bits of a
    sequence's scores depend on the other sequences of its batch."""
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
        rules: the method with its weights. The budget in `rules` is ignored: `start` sets the budget of each sequence.
        log: receives the kept positions of every eviction, see `rules.KeptLog`.
    """

    def __init__(self, rules: Rules, cache: SlotCache, log: KeptLog | None = None) -> None:
        self.rules, self.cache, self.log = rules.decoding(), cache, log
        self.method = self.rules.method
        self.trigger = self.method.trigger(rules.interval)
        self.needs = self.method.needs()
        self.stacked = self.method.stacked
        # Queries that `observe` sees at a tick: all since the previous tick, or none if steps summed their attention.
        self._since_last = 0 if cache.shape.sums else min(self.trigger.growth or 0, cache.shape.queries)
        self._width = self.needs.window if cache.shape.marks else self.needs.width  # newest queries that `score` sees
        slots = cache.slots
        self.budget: list[int | None] = [None] * slots
        self.prompt_len = [0] * slots
        self.evictions = [0] * slots
        self.noise_key = [0] * slots
        self._ordinals = {store.geometry.index: i for i, store in enumerate(cache.evicting)}

    def start(self, slot: int, budget: int | None, prompt_len: int, noise_key: int, evictions: int = 0) -> None:
        """Register a new sequence in `slot`, with its budget, prompt length and evictions so far."""
        self.budget[slot], self.prompt_len[slot] = budget, prompt_len
        self.noise_key[slot], self.evictions[slot] = noise.signed64(noise_key), evictions

    def tick(self, slots: Sequence[int]) -> list[int]:
        """Run a tick of the sequences in these slots; return the slots that lost entries.

        A method with `Needs(queries="since_last")` first observes each sequence's new queries, or the sums of their
        attention. Then the method evicts entries of those sequences for which the trigger demands an eviction
        (`Trigger.full`).
        """
        cache, observes = self.cache, self.needs.queries == "since_last"
        held, sizes = {s: cache.held(s) for s in slots}, {s: self._allowed(s) for s in slots}
        due = {s: sizes[s] for s in slots if self.trigger.full(held[s], sizes[s])}
        with gathered():
            self._complete(slots if observes else list(due))
            if observes:
                for stack, batch in self._batches(dict.fromkeys(slots, 0), self._since_last):
                    self._observe(stack, batch)
            for parts in self._alone(due) if self.method.layerwise else self._jointly(due):
                self._reduce(parts)
            for stack in cache.stacks:
                stack.clear_sums(slots)
            cache.settle(due)
        for s, size in due.items():
            self.evictions[s] += 1
            check_held(cache.held(s), size)  # over all layers: the method may have decided layer by layer
        return [s for s in due if cache.held(s) < held[s]]

    def mark(self, clocks: Mapping[int, int]) -> None:
        """Begin new sums of attention in the slots that are as many steps before their tick as a mark says. clocks:
        each slot's decode steps since the prompt."""
        for number, ahead in enumerate(self.cache.shape.marks):
            if slots := [slot for slot, clock in clocks.items() if self.trigger.due(clock + ahead)]:
                for stack in self.cache.stacks:
                    stack.mark(slots, number)

    def kept(self, slot: int, spans: Sequence[tuple[int, int]]) -> tuple[float, float]:
        """Return the share of text tokens, and the share of image tokens, that still have an entry in a slot.

        Each share is a mean over the heads of evicted layers. spans: for each image, its first position and its last
        position + 1.
        """
        self._complete([slot])
        held: list[torch.Tensor] = []
        for stack, batch in self._batches({slot: 0}, 0):
            rows = stack.entries(batch, keys=False, values=False)
            valid = torch.ones_like(rows.positions, dtype=torch.bool) if rows.valid is None else rows.valid
            held += [p[v] for p, v in zip(rows.positions.flatten(0, 1), valid.flatten(0, 1))]
        return kept_shares(held, spans, self.cache.seen[slot])

    def _allowed(self, slot: int) -> int:
        seen = self.cache.seen[slot]
        return allowed(self.method, self.budget[slot], self.prompt_len[slot], seen, self.evictions[slot])

    def _complete(self, slots: Sequence[int]) -> None:
        """Write the positions and initial columns that the newest entries of these slots lack (`SlotCache.fresh`)."""
        fresh = np.array(self.cache.fresh)
        for stack in self.cache.stacks:
            rows = stack.rows_of([s for s in slots if fresh[s]])
            new = fresh[rows % stack.slots]
            for some in _equal(rows, stack.filled(rows), new):
                stack.complete(self._batch(stack, some, 0), int(fresh[some[0] % stack.slots]))
        for s in slots:
            self.cache.fresh[s] = 0

    def _batches(self, sizes: Mapping[int, int], queries: int) -> Iterator[Part]:
        """Yield batches of rows. A row is one layer of one slot; one view shows all rows of a batch. sizes: maps each
        slot to the entries per head that it may keep; queries: number of newest queries in a view."""
        for stack in self.cache.stacks:
            rows = stack.rows_of(list(sizes))
            size = np.array([sizes[s] for s in (rows % stack.slots).tolist()], dtype=np.int64)
            layer = np.zeros_like(rows) if self.stacked else rows // stack.slots
            for some in _equal(rows, *stack.shown(rows), size, layer):
                shown, _ = stack.shown(some[:1])
                most = self._at_once(stack, int(shown[0]), queries)
                for first in range(0, len(some), most):
                    part = some[first : first + most]
                    yield stack, self._batch(stack, part, sizes[int(part[0]) % stack.slots])

    def _alone(self, sizes: Mapping[int, int]) -> Iterator[list[Part]]:
        yield from ([part] for part in self._batches(sizes, self._width))

    def _jointly(self, sizes: Mapping[int, int]) -> Iterator[list[Part]]:
        """Yield groups of batches. In each group the method decides about all layers of some slots together.

        The method gets one view per batch. A group is one batch with all layers if that fits into one view, else one
        batch per layer. The slots of a group have equal `sizes` (see `_batches`) and equally long views. All views of a
        group together take no more scratch than one view may take, unless the group has only one slot.
        """
        one_view: dict[tuple[int, ...], list[int]] = {}
        by_layer: dict[tuple[int, ...], list[int]] = {}
        for s, size in sizes.items():
            if self._fitting(s):
                one_view.setdefault((size, *self._shown(s, together=True)), []).append(s)
            else:
                by_layer.setdefault((size, *self._shown(s, together=False)), []).append(s)
        stack = self.cache.stacks[0]
        for (size, *_), slots in sorted(one_view.items()):
            most = self._fitting(slots[0])
            for first in range(0, len(slots), most):
                rows = stack.rows_of(slots[first : first + most])
                yield [(stack, self._batch(stack, rows, size, tuple(m.index for m in stack.members)))]
        layers = sum(len(stack.members) for stack in self.cache.stacks)
        for (size, *shown), slots in sorted(by_layer.items()):
            together = min(self._at_once(stack, max(shown), self._width) for stack in self.cache.stacks)
            most = max(1, together // layers)
            for some in (slots[first : first + most] for first in range(0, len(slots), most)):
                parts = [
                    (stack, self._batch(stack, own, size, (member.index,)))
                    for stack in self.cache.stacks
                    for member, own in zip(stack.members, stack.rows_of(some).reshape(len(stack.members), -1))
                ]
                yield sorted(parts, key=lambda part: part[1].together)

    def _shown(self, slot: int, together: bool) -> list[int]:
        """Return, for each view of a slot, its places per head and whether its heads are padded (`Stack.shown`).

        The result is one flat list: for each stack, the numbers of places of all views, then the flags of all views.
        Slots with equal results may share a batch. together: whether each view shows all layers of a stack, or only
        one.
        """
        of = (stack.rows_of([slot]) for stack in self.cache.stacks)
        shown = (stack.shown(rows[None] if together else rows) for stack, rows in zip(self.cache.stacks, of))
        return np.concatenate([numbers for pair in shown for numbers in pair]).tolist()

    def _fitting(self, slot: int) -> int:
        """Return how many slots with as many entries as `slot` fit into one view of all layers. 0 if not even one slot
        fits, or if each layer needs a view of its own."""
        if not self.stacked or len(self.cache.stacks) > 1:  # stacks reorder the layers, whose order breaks ties
            return 0
        stack = self.cache.stacks[0]
        return self._at_once(stack, self._shown(slot, together=True)[0], self._width) // len(stack.members)

    def _at_once(self, stack: Stack, entries: int, queries: int) -> int:
        """Return how many rows of a stack one view may show, see `stack.at_once`."""
        return stack.at_once(self.needs, entries, queries, kernels=self.rules.kernels)

    def _batch(self, stack: Stack, rows: np.ndarray, allowed: int, together: tuple[int, ...] = ()) -> RowBatch:
        slots = rows % stack.slots
        facts = [self.cache.seen, self.prompt_len, self.evictions, self.noise_key]
        table = np.stack([rows, stack.layer_indices(rows), *(np.array(fact)[slots] for fact in facts)])
        index, layers, seen, prompt_len, evictions, noise_key = upload(table, stack.device).unbind()
        consecutive = int(rows[-1]) - int(rows[0]) == len(rows) - 1
        return RowBatch(
            rows=rows,
            index=index,
            at=slice(int(rows[0]), int(rows[-1]) + 1) if consecutive else index,
            kernels=self.rules.kernels,
            layers=layers if self.stacked else None,
            seen=seen,
            longest=max(self.cache.seen[s] for s in slots.tolist()),
            prompt_len=prompt_len,
            evictions=evictions,
            noise_key=noise_key,
            allowed=allowed,
            together=together,
        )

    def _observe(self, stack: Stack, batch: RowBatch) -> None:
        view = self._view(stack, batch, self._since_last, sums=stack.sums_of(batch))
        stack.write(batch, observed(self.method, view))

    def _reduce(self, parts: Sequence[Part]) -> None:
        views = [
            self._view(stack, batch, self._width, newest_sums=stack.newest_sums_of(batch)) for stack, batch in parts
        ]
        for (stack, batch), view, verdict in zip(parts, views, select.decide(self.method, views)):
            stack.write(batch, verdict.columns)
            if self.log is not None:
                self._report(stack, batch, view.positions, verdict.keep)
            stack.compact(batch, verdict.keep)

    def _report(self, stack: Stack, batch: RowBatch, positions: torch.Tensor, keep: torch.Tensor) -> None:
        assert self.log is not None
        for i, (slot, layer) in enumerate(zip(batch.rows % stack.slots, stack.layer_indices(batch.rows).tolist())):
            kept = [p[k] for p, k in zip(positions[i], keep[i])]
            self.log(self.noise_key[slot], self.cache.seen[slot], layer, kept)

    def _view(self, stack: Stack, batch: RowBatch, width: int, **sums: Any) -> LayerView:
        """Return a view with the newest `width` queries. sums: the view's fields `sums` or `newest_sums`."""
        queries, query_positions = stack.newest_queries(batch, width)
        return self.rules.view(
            stack.members[int(batch.rows[0]) // stack.slots],
            self._ordinals,
            stack.entries(batch, keys=shows_keys(self.needs, width), values=self.needs.values),
            batch,
            queries=queries,
            query_positions=query_positions,
            **sums,
            hidden=stack.newest_hidden(batch, min(self.needs.hidden, stack.hidden.shape[2])),
            states=stack.states_of(batch),
        )


def _equal(rows: np.ndarray, *keys: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the rows in groups with equal numbers in all of `keys`. keys: arrays with one number per row."""
    if len(rows):
        kinds, kind = np.unique(np.stack(keys), axis=1, return_inverse=True)
        yield from (rows[kind.ravel() == number] for number in range(kinds.shape[1]))
