"""The generation loop: slots, continuous refill, one decode step after the other, eviction at each sequence's own
ticks.

A prompt is read once and its evicted cache copied to the slots of its samples. A finished sequence's slot is refilled
at once. Every step runs all slots, idle ones included, so shapes never change: with the slot count fixed, a
sequence's tokens are bit-equal whatever runs beside it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from dataclasses import replace

import torch

from kvbench.console import faults
from kvbench.engine.attention.interface import AttentionCall, route
from kvbench.engine.attention.rope import read_rope
from kvbench.engine.cache.layout import (
    Layout,
    Lengths,
    check_prefill,
    entry_budget,
    fit,
    make_cache,
    shape_of,
    stored_queries,
)
from kvbench.engine.cache.prompt import KeptLog, Rules
from kvbench.engine.draws import next_tokens
from kvbench.engine.evict import Evictor, one_thread
from kvbench.engine.memory import OutOfMemory
from kvbench.engine.model.load import LoadedModel, load_draft
from kvbench.engine.model.packing import packed_linears
from kvbench.engine.prefill import Prefill, PromptReader, PromptState
from kvbench.engine.probes import Drafts
from kvbench.engine.sequence import Sequence
from kvbench.engine.slots import Slots
from kvbench.engine.writers import step_writer
from kvbench.eviction import noise
from kvbench.eviction.api import Method
from kvbench.records import Generation, Request, Sampling

Snapshot = Callable[[int, int, int], None]  # (tokens generated, live KV bytes, slots in use) after each step


class Engine:
    """Generates for one method at one budget.

    Args:
        loaded: model, tokenizer and geometry.
        method: the eviction method.
        budget: entries per layer and KV head, or as a float the share of each prompt; None exactly when the method
            takes none.
        slots: sequences decoded at once.
        max_tokens: longest prompt plus output; `max_output`: longest output; `tail`: longest part of a prompt that is
            read after its compression. They size the rows of a slot.
        prefill_chunk, prefill: see `prefill.PromptReader`.
        layout: of the cache; "auto" is dense for methods that keep heads equal and paged for others.
        log: receives what every eviction kept, as (noise key, tokens seen, layer, positions of each head); a prompt's
            key is that of sample -1.
        on_step: progress callback.

    Raises:
        UserError: the method cannot serve this model.
        SetupError: weights that the method needs are missing or belong to another model.
        OutOfMemory: so many slots do not fit.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        method: Method,
        *,
        budget: float | None,
        interval: int,
        slots: int,
        max_tokens: int,
        max_output: int | None = None,
        tail: int = 0,
        prefill_chunk: int = 512,
        prefill: Prefill = "full",
        layout: Layout = "auto",
        log: KeptLog | None = None,
        on_step: Snapshot | None = None,
    ) -> None:
        self.loaded, self.method, self.budget, self.on_step = loaded, method, budget, on_step
        self.trigger = method.during("decode").trigger(interval)
        self.interval, self.max_tokens = interval, max_tokens
        check_prefill(method, prefill)
        geometry = fit(loaded.geometry, method, max_tokens)
        lengths = Lengths(total=max_tokens, output=min(max_output or max_tokens, max_tokens), tail=tail)
        shape = shape_of(loaded.geometry, method, budget, interval, lengths, slots)
        self.cache = make_cache(geometry, method, shape, loaded.device, loaded.dtype, layout)
        self._slot_bytes = self.cache.slot_bytes()
        # Entries are counted per KV head, also where every query head has its own.
        self._group = max((g.group for g in loaded.geometry), default=1)
        self._copies = self._group if method.per_query_head else 1
        self.rules = rules = rules_for(method, loaded, interval)
        self.evictor = Evictor(rules, self.cache, log) if method.evicts else None
        self.reader = PromptReader(
            loaded.model,
            geometry,
            queries=stored_queries(method, interval, max_tokens)[0] if method.evicts else 0,
            chunk=prefill_chunk,
            prefill=prefill,
            tokenizer=loaded.tokenizer,
            drafts=Drafts(load_draft(loaded), loaded),
            device=loaded.device,
            log=log,
            flash=loaded.attn == "flash",
        )
        self.writer = step_writer(self.cache, rules)
        self._handler: Callable[[AttentionCall], torch.Tensor] = self.writer
        self.slots = Slots(slots)
        self._under_way: list[Sequence] = []
        self._done: deque[Generation] = deque()
        self._queue: deque[tuple[Request, list[Sequence]]] = deque()
        self._sampling = Sampling()

    def generate(self, requests: Iterable[Request]) -> Generator[Generation, None, None]:
        """Yield every sample of every request as it finishes. All requests must share one `Sampling`.

        Raises OutOfMemory, after which the engine is of no more use.
        """
        try:
            yield from self._generate(requests)
        except Exception as error:
            if not faults.out_of_memory(error):
                raise
            raise OutOfMemory(error, self._under_way) from error

    @torch.inference_mode()
    def _generate(self, requests: Iterable[Request]) -> Iterator[Generation]:
        queue = self._queue = deque((r, [self._sequence(r, sample) for sample in r.samples]) for r in requests)
        if len({request.sampling for request, _ in queue}) > 1:
            raise ValueError("the requests of one call must share their sampling parameters")
        if queue:
            self._sampling = queue[0][0].sampling
        prompt: PromptState | None = None
        waiting: deque[Sequence] = deque()  # of `prompt`, without a slot yet
        model = self.loaded.model
        hidden = self.method.reads_tokens
        with route(model, lambda call: self._handler(call), hidden), packed_linears(model, self.cache.slots):
            while queue or waiting or self.slots.live():
                while (queue or waiting) and self.slots.free():
                    if not waiting:
                        request, sequences = queue.popleft()
                        prompt = self._read(request, sequences)
                        if prompt is None:
                            continue
                        waiting.extend(sequences)
                    assert prompt is not None
                    self._admit(prompt, waiting)
                if self.slots.live():
                    self._step()
                while self._done:
                    yield self._done.popleft()
        while self._done:
            yield self._done.popleft()

    @staticmethod
    def _sequence(request: Request, sample: int) -> Sequence:
        return Sequence(request, sample, noise.signed64(request.noise_key(sample)))

    def _read(self, request: Request, sequences: list[Sequence]) -> PromptState | None:
        longest = request.max_tokens or len(request.prompt_ids) + request.max_new_tokens
        if self.max_tokens < longest <= self.loaded.context:
            raise ValueError(f"a request of {longest} tokens in an engine made for max_tokens={self.max_tokens}")
        if not request.prompt_ids or longest > self.loaded.context:
            have, want = len(request.prompt_ids), longest - len(request.prompt_ids)
            note = f"{have} prompt tokens + {want} new tokens in a context of {self.loaded.context}"
            for sequence in sequences:
                status = "prompt_too_long" if request.prompt_ids else "prompt_empty"
                refused = Generation(
                    request=request,
                    sample=sequence.sample,
                    token_ids=(),
                    text="",
                    stop_reason="",
                    usage=None,
                    status=status,
                    note=note,
                )
                self._done.append(refused)
            return None
        self._under_way = sequences
        began = self._now()
        self._handler = self.reader.handle
        budget = entry_budget(self.method, self.budget, len(request.prompt_ids), self._group)
        rules = replace(self.rules, budget=budget)
        try:
            state = self.reader.read(request.prompt_ids, rules, request.noise_key(-1), request.compress_at)
        finally:
            self._handler = self.writer
        state.seconds = self._now() - began - state.evict_seconds
        return state

    def _admit(self, prompt: PromptState, waiting: deque[Sequence]) -> None:
        """Give waiting samples of one prompt their first token and a free slot each."""
        free = self.slots.free()[: len(waiting)]
        started = self._under_way = [waiting.popleft() for _ in free]
        tokens, bad = self._draw(prompt.logits.expand(len(started), -1), started)
        placed: list[int] = []
        ended: list[Sequence] = []
        for slot, sequence, token, nan in zip(free, started, tokens, bad):
            sequence.meter.read(prompt, len(sequence.request.samples), self._copies)
            self._accept(sequence, token, nan)
            if sequence.finished and not self._goes_on(sequence, prompt.tokens):
                sequence.meter.held(prompt.held * self._copies, prompt.bytes_left(), prompt.bytes_extra())
                ended.append(sequence)
                continue
            if sequence.tokens or sequence.pending:
                placed.append(slot)
                self.slots.seat(slot, sequence)
        for sequence in ended:
            self._finish(sequence)
        if not placed:
            return
        self.cache.install(prompt.layers, placed, prompt.tokens)
        for slot, occupant in self.slots.of(placed):
            self._hold(occupant, slot)
            if self.evictor is not None:
                self.evictor.start(slot, prompt.budget, prompt.tokens, occupant.key, prompt.decisions)

    def _draw(self, logits: torch.Tensor, rows: Collection[Sequence | None]) -> tuple[list[int], list[bool]]:
        return next_tokens(logits, rows, self._sampling, self.loaded.stop_ids)

    def _step(self) -> None:
        """One token for every slot, then the evictions that are due."""
        began = self._now()
        cache, device, live = self.cache, self.loaded.device, self.slots.live()
        slots = [slot for slot, _ in live]
        self._under_way = [sequence for _, sequence in live]
        positions = self.writer.begin(self._queries_wanted(live))
        tokens = torch.tensor(self.slots.inputs, device=device)
        out = self.loaded.model(
            input_ids=tokens[:, None],
            position_ids=positions[:, None],
            attention_mask=None,
            past_key_values=None,
            use_cache=False,
        )
        new, bad = self._draw(out.logits[:, -1], self.slots.sequences)
        cache.advance(slots)
        self._measure(live)
        decoded = self._now()
        for _, sequence in live:
            sequence.clock += 1
        ticked = [slot for slot, sequence in live if self.trigger.due(sequence.clock)]
        if ticked and self.evictor is not None:
            with one_thread(device):
                evicted_slots = self.evictor.tick(ticked)
            for slot, sequence in self.slots.of(evicted_slots):
                sequence.meter.evicted(cache.held(slot) * self._copies, cache.seen[slot])
        evicted = self._now()
        for slot, sequence in live:
            sequence.meter.decode_seconds += (decoded - began) / len(live)
            sequence.meter.evict_seconds += (evicted - decoded) / len(live)
            if not sequence.pending:
                self._accept(sequence, new[slot], bad[slot])
            if sequence.finished and not self._goes_on(sequence, cache.seen[slot]):
                self._finish(sequence)
                self._release(slot)
            elif sequence.tokens or sequence.pending:
                self.slots.seat(slot, sequence)
            else:  # its next turn is a new prompt
                self._release(slot)

    def _goes_on(self, sequence: Sequence, seen: int) -> bool:
        """Begin a finished sequence's next turn, if it has one: in its slot, or first in the queue as a new prompt."""
        follow = sequence.follow(self.loaded.decode, seen)
        if follow is not None and follow.fresh:
            self._queue.appendleft((sequence.request, [sequence]))
        return follow is not None

    def _queries_wanted(self, live: list[tuple[int, Sequence]]) -> bool:
        """Whether this step's queries can still be among the stored ones at some sequence's next tick."""
        width = self.cache.shape.queries
        if width == 0 or self.trigger.growth is None or width >= self.trigger.growth:
            return width > 0
        wanted = range(1, width + 1)
        return any(self.trigger.due(sequence.clock + ahead) for _, sequence in live for ahead in wanted)

    def _measure(self, live: list[tuple[int, Sequence]]) -> None:
        total = sum(self._hold(sequence, slot) for slot, sequence in live)
        if self.on_step is not None:
            self.on_step(len(live), total, len(live))

    def _hold(self, sequence: Sequence, slot: int) -> int:
        """Note what a slot holds; returns its live bytes."""
        cache, size = self.cache, self.cache.live_bytes(slot)
        sequence.meter.held(cache.held(slot) * self._copies, size, cache.extra_bytes(slot))
        return size

    def _accept(self, sequence: Sequence, token: int, nan: bool) -> None:
        sequence.accept(token, nan, self.loaded.stop_ids, self.loaded.decode)

    def _finish(self, sequence: Sequence) -> None:
        self._done.append(sequence.generation(self.loaded.decode, self._slot_bytes))

    def _release(self, slot: int) -> None:
        """An idle slot goes on computing a one-entry row at position 0 that nobody reads."""
        self.slots.clear(slot)
        self.cache.clear(slot)

    def _now(self) -> float:
        if self.loaded.device.type == "cuda":
            torch.cuda.synchronize(self.loaded.device)
        return time.perf_counter()


def rules_for(method: Method, loaded: LoadedModel, interval: int) -> Rules:
    """The method with all that it needs of a model. Raises SetupError when its weights are missing or another's."""
    weights = {}
    if (needed := method.weights()) is not None:
        from kvbench.engine.model.weights import load_weights

        weights = load_weights(needed, loaded.folder, loaded.model.config, loaded.device, loaded.fingerprint)
    return Rules(
        method=method,
        budget=None,
        interval=interval,
        weights=weights,
        rope=read_rope(loaded.model) if method.needs().rope else None,
    )
