"""Runs the generations of an audit: a `Trial` records one generation, a `Bench` is the engine that runs trials."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.audit.invariants.watch import Seen, watching
from kvbench.engine.cache.paged import PagedCache
from kvbench.engine.cache.pool import PAGE
from kvbench.engine.cache.slot_cache import SlotCache
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import LoadedModel
from kvbench.engine.reference import KeptHistory
from kvbench.eviction import noise
from kvbench.eviction.api import Method
from kvbench.records import Generation, Request


@dataclass(frozen=True, slots=True)
class Holding:
    """How many entries (a mean over its heads) and bytes one sequence holds in its slot after a step."""

    key: int
    seen: int
    entries: float
    bytes: int  # without memory that does not depend on the sequence's length


@dataclass
class Trial:
    """The record of one generation: requests, answers, evictions, the views that methods received, and memory."""

    requests: list[Request]
    budget: float | None
    done: dict[tuple[str, int], Generation]  # by question and sample
    history: KeptHistory
    seen: Seen
    holdings: list[Holding]
    lost_pages: str  # message if a page is lost or not given back; otherwise empty
    cache: SlotCache

    def kept(self, request: Request, sample: int) -> dict[tuple[int, int], list[list[int]]]:
        """Return the positions that each head kept at each eviction of a sample and its prompt. The keys are (tokens
        seen, layer)."""
        return {
            (seen, layer): [sorted(head.tolist()) for head in heads]
            for key in noise_keys(request, sample)
            for seen, layer, heads in self.history.events.get(key, ())
        }

    def sequences(self) -> Iterator[tuple[Request, int]]:
        """Yield every request with each of its samples."""
        for request in self.requests:
            yield from ((request, sample) for sample in request.samples)

    def owner(self, key: int) -> tuple[Request, int]:
        """Return the request and the number of the sample that the engine's log calls `key`. If `key` belongs to
        a prompt, which all its samples share, the number is that of the first sample.

        Raises KeyError for an unknown key.
        """
        for request, sample in self.sequences():
            if key in noise_keys(request, sample):
                return request, sample
        raise KeyError(key)


def noise_keys(request: Request, sample: int) -> list[int]:
    """Return the two keys under which the engine's log lists evictions of a sequence: the prompt's, the sample's."""
    return [noise.signed64(request.noise_key(s)) for s in (-1, sample)]


class Bench:
    """An engine that runs one trial after the other.

    It runs every step in PyTorch, without CUDA graphs or compiled code, so that `watching` can record all of them.
    """

    def __init__(self, loaded: LoadedModel, method: Method, **settings: Any) -> None:
        """Make the engine. settings: further arguments of `Engine`."""
        self.method = method
        plain: dict[str, Any] = {"prefill_chunk": 32, "backend": "torch", "compiled": False, "graph": False, "look": 1}
        self.engine = Engine(
            loaded,
            method,
            **plain | settings,
            log=lambda *event: self.history(*event),
            on_step=lambda *_: self._measure(),
        )

    def run(self, requests: Sequence[Request]) -> Trial:
        self.history, self.holdings, self.lost_pages = KeptHistory(), list[Holding](), ""
        with watching(self.method) as seen:
            done = {(d.request.doc_id, d.sample): d for d in self.engine.generate(requests)}
        self._count_pages(idle=True)
        recorded = (done, self.history, seen, self.holdings, self.lost_pages, self.engine.cache)
        return Trial(list(requests), self.engine.budget, *recorded)

    def _measure(self) -> None:
        cache = self.engine.cache
        for slot, sequence in self.engine.slots.live():
            seen = cache.seen[slot]
            size = cache.live_bytes(slot) - cache.fixed_bytes(seen)
            self.holdings.append(Holding(sequence.key, seen, cache.held(slot), size))
        self._count_pages()

    def _count_pages(self, idle: bool = False) -> None:
        """Check that every page of the cache is free or in use by exactly one head; note a breach in `lost_pages`.
        idle: all sequences have ended, so every page must be free."""
        cache = self.engine.cache
        if not isinstance(cache, PagedCache) or self.lost_pages:
            return
        for pool in cache.pools.values():
            total = len(pool.positions) // PAGE - 1  # page 0 is never given out
            used: list[int] = []
            for blocks in (stack.blocks for stack in cache.stacks if stack.pool is pool):
                for row, count in zip(blocks.table.reshape(-1, blocks.table.shape[2]), blocks.pages.reshape(-1)):
                    used.extend(row[:count].tolist())
            pages = sorted([*used, *pool.free])
            if pages != list(range(1, total + 1)):
                self.lost_pages = (
                    f"a page is lost or listed twice: {len(used)} in use, {len(pool.free)} free, {total} in all"
                )
            elif idle and used:
                self.lost_pages = f"{len(used)} of {total} pages were not given back when all sequences had ended"
