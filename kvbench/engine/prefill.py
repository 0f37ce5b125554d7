"""Reading a prompt. Three ways, one result: the packed entries of every layer, and the logits that follow.

    layer by layer   the whole prompt in one forward pass; every layer is evicted right after its attention. The
                     prompt's hidden states are those of the full cache, and the peak is one layer's full KV plus the
                     budgets.
    whole            in chunks, all layers in full until the end: for the full cache, for methods that need all layers
                     at once, and for probes. Hidden states are those of the full cache too.
    chunked          in chunks, every chunk followed by an eviction: memory is bounded for any length, but later
                     chunks read an evicted cache, so results are another experiment's (`prefill=chunked`).

With query-agnostic compression only the context is evicted; the question after it is read against what is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from kvbench.engine.attention.geometry import LayerGeometry
from kvbench.engine.attention.interface import AttentionCall
from kvbench.engine.cache.prompt import (
    KeptLog,
    PackedLayer,
    PromptCache,
    PromptLayer,
    Rules,
    check_held,
)
from kvbench.engine.evict import one_thread
from kvbench.engine.probes import Drafts, ReadPrompt, reading, run_probes
from kvbench.engine.writers import BlockWriter
from kvbench.eviction.api import Probe

Prefill = Literal["full", "chunked"]


@dataclass(slots=True)
class PromptState:
    """A prompt that was read: what is left of each layer, and the logits [V] that follow it."""

    layers: dict[int, PackedLayer]
    logits: torch.Tensor
    tokens: int
    budget: int | None  # entries
    held: float  # entries per layer and head that are left
    decisions: int  # how often the method was asked,
    evictions: int  # and how often that dropped something
    first_eviction: int | None  # tokens seen then
    after_evict: float | None  # largest count right after an eviction
    entries_peak: float
    bytes_peak: int
    seconds: float = 0.0  # reading
    evict_seconds: float = 0.0  # deciding, probes included

    def bytes_left(self) -> int:
        """Of all layers as they are handed over."""
        return sum(layer.bytes() for layer in self.layers.values())

    def bytes_extra(self) -> int:
        """Of these, what is neither key nor value."""
        return sum(layer.bytes() - layer.keys.nbytes - layer.values.nbytes for layer in self.layers.values())


class PromptReader:
    """Reads one prompt after the other.

    Args:
        model: a transformers causal LM whose attention is routed to `handle`.
        geometry: of the cache, as `layout.fit` returns it.
        queries: how many of the newest queries every layer keeps.
        chunk: tokens a forward pass; where the whole prompt is one pass, queries that attend at once.
        flash: as of `BlockWriter`; probes have none.
    """

    def __init__(
        self,
        model: Any,
        geometry: Sequence[LayerGeometry],
        *,
        queries: int,
        chunk: int,
        prefill: Prefill,
        tokenizer: Any,
        drafts: Drafts,
        device: torch.device,
        log: KeptLog | None = None,
        flash: bool = False,
    ) -> None:
        self.model, self.geometry, self.queries, self.chunk, self.prefill = model, geometry, queries, chunk, prefill
        self.tokenizer, self.drafts, self.device, self.log = tokenizer, drafts, device, log
        self._begin = partial(BlockWriter, block=chunk, flash=flash)
        self._writer: BlockWriter | None = None
        self._evict_seconds = 0.0

    def handle(self, call: AttentionCall) -> torch.Tensor:
        assert self._writer is not None
        return self._writer(call)

    def read(self, ids: Sequence[int], rules: Rules, noise_key: int, compress_at: int | None = None) -> PromptState:
        """Read a prompt of at least one token.

        compress_at: leading tokens after which entries are evicted; default all.
        """
        cache, logits, reading = self._read([ids], rules, [noise_key], compress_at)
        return PromptState(
            layers={index: layer.pack(0) for index, layer in cache.layers.items()},
            logits=logits[0],
            tokens=len(ids),
            budget=rules.budget,
            held=cache.held(),
            decisions=cache.evictions,
            evictions=reading.dropped,
            first_eviction=reading.first,
            after_evict=reading.after,
            entries_peak=max(reading.peak, cache.held()),
            bytes_peak=cache.peak_bytes,
            evict_seconds=self._evict_seconds,
        )

    def open(
        self, prompts: Sequence[Sequence[int]], rules: Rules, noise_keys: Sequence[int]
    ) -> tuple[PromptCache, torch.Tensor]:
        """Read equally long prompts, one where the method probes, into a cache that `go_on` adds to.

        Also returns the logits [b, V] that follow.
        """
        cache, logits, _ = self._read(prompts, rules, noise_keys, None)
        return cache, logits

    def go_on(self, cache: PromptCache, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Read the next t tokens of every sequence of an open cache; logits [b, t, V] after each of them."""
        logits = self._forward(self._begin(cache), tokens, cache.seen, every=True)
        cache.seen += len(tokens[0])
        cache.forget_windows()
        return logits

    def _read(
        self, prompts: Sequence[Sequence[int]], rules: Rules, noise_keys: Sequence[int], compress_at: int | None
    ) -> tuple[PromptCache, torch.Tensor, _Reading]:
        """The cache of b prompts after their evictions, logits [b, V], and what the evictions were."""
        length = len(prompts[0])
        context = length if compress_at is None else compress_at
        acting = rules.method.during("prefill")
        one_pass = self.prefill == "full" and acting.evicts and acting.layerwise and not acting.needs().probes
        cache = PromptCache(
            self.geometry,
            rules,
            prompt_len=length,
            queries=self.queries,
            size=context if self.prefill == "full" else min(context, self.chunk),
            noise_keys=noise_keys,
            device=self.device,
            log=self.log,
        )
        observer = cache.hand_over if acting.evicts and rules.method.needs().queries == "since_last" else None
        self._evict_seconds, reading = 0.0, _Reading(cache, context)
        if one_pass:
            finished = self._timed(reading.layer_done) if acting.evicts else None
            logits = self._forward(
                self._begin(cache, observer=observer, finished=finished), _part(prompts, 0, context), 0
            )
            reading.close()
        else:
            writer = self._begin(cache, observer=observer)
            for start in range(0, context, self.chunk):
                end = min(start + self.chunk, context)
                logits = self._forward(writer, _part(prompts, start, end), start)
                cache.seen = end
                if self.prefill == "chunked":
                    cache.forget_windows()
                    self._timed(reading.evict)()
            if self.prefill == "full":
                if acting.needs().probes and cache.full():
                    self._probe(acting, cache, prompts[0][:context], logits[0])
                self._timed(reading.evict)()
        for start in range(context, length, self.chunk):
            end = min(start + self.chunk, length)
            logits = self._forward(self._begin(cache, observer=observer), _part(prompts, start, end), start)
            cache.seen = end
        self._writer = None
        return cache, logits, reading

    def _forward(
        self, writer: BlockWriter, tokens: Sequence[Sequence[int]], start: int, *, every: bool = False
    ) -> torch.Tensor:
        """Logits [b, V] after the last of the tokens [b][t], or [b, t, V] after every one."""
        ids = torch.tensor([list(row) for row in tokens], device=self.device)
        logits = self._run(writer, start, ids.shape[1], 0 if every else 1, input_ids=ids)
        return logits if every else logits[:, -1]

    def _run(self, writer: BlockWriter, start: int, rows: int, keep: int, **inputs: torch.Tensor) -> torch.Tensor:
        """Logits [b, keep, V] of the last `keep` rows; 0: of all."""
        self._writer = writer
        positions = writer.begin(start, rows)
        out = self.model(
            **inputs,
            position_ids=positions[None],
            attention_mask=None,
            past_key_values=None,
            use_cache=False,
            logits_to_keep=keep,
        )
        logits: torch.Tensor = out.logits
        return logits

    def _read_probe(
        self, weights: Mapping[str, torch.Tensor], writer: BlockWriter, probe: Probe, start: int
    ) -> tuple[torch.Tensor, int]:
        """Logits [V] after the last row of a probe, and its number of rows."""
        with reading(self.model, probe, weights) as (inputs, rows):
            return self._run(writer, start, rows, 1, **inputs)[0, -1], rows

    def _probe(self, method: Any, cache: PromptCache, ids: Sequence[int], logits: torch.Tensor) -> None:
        prompt = ReadPrompt(tuple(ids), cache.allowed(), int(logits.argmax()), self.tokenizer, self.drafts)
        began = self._now()
        with one_thread(self.device):
            run_probes(method, cache, prompt, partial(self._read_probe, cache.rules.weights), self.chunk)
        self._evict_seconds += self._now() - began

    def _timed(self, work: Callable[..., None]) -> Callable[..., None]:
        """The work on one thread, its time counted as eviction's."""

        def timed(*args: Any) -> None:
            began = self._now()
            with one_thread(self.device):
                work(*args)
            self._evict_seconds += self._now() - began

        return timed

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


class _Reading:
    """Evictions of one prompt, and what they left."""

    def __init__(self, cache: PromptCache, context: int) -> None:
        self.cache, self.context = cache, context
        self.dropped = 0
        self.first: int | None = None
        self.after: float | None = None
        self.peak = 0.0
        self._allowed = 0
        self._decided = False

    def layer_done(self, layer: PromptLayer) -> None:
        """Evict one layer as soon as it was attended to."""
        cache = self.cache
        cache.seen = self.context
        self.peak = max(self.peak, layer.held())
        if not layer.geometry.evicts:
            return
        self._allowed = cache.allowed()
        if cache.acting.trigger(1).full(layer.held(), self._allowed):
            cache.evict([layer.geometry.index])
            self._decided = True

    def close(self) -> None:
        """All layers were read and evicted one by one."""
        if self._decided:
            self._note(self.context)
            check_held(self.cache.held(), self._allowed)

    def evict(self) -> None:
        """Evict all layers together if they hold too much."""
        cache = self.cache
        held = cache.held()
        self.peak = max(self.peak, held)
        if cache.reduce():
            self._note(held)

    def _note(self, before: float) -> None:
        """A decision was made; it counts as an eviction where it dropped something."""
        cache = self.cache
        cache.evictions += 1
        if cache.held() < before:
            self.dropped += 1
            self.after = max(self.after or 0.0, cache.held())
            self.first = self.first or cache.seen


def _part(prompts: Sequence[Sequence[int]], start: int, end: int) -> list[Sequence[int]]:
    return [prompt[start:end] for prompt in prompts]
