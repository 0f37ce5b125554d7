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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from kvbench.engine.attention import AttentionCall
from kvbench.engine.evict import one_thread
from kvbench.engine.forward import BlockWriter
from kvbench.engine.geometry import LayerGeometry
from kvbench.engine.probes import Drafts, ReadPrompt, run_probes
from kvbench.engine.prompt import (
    KeptLog,
    PackedLayer,
    PromptCache,
    PromptLayer,
    Rules,
    check_held,
)

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
    ) -> None:
        self.model, self.geometry, self.queries, self.chunk, self.prefill = model, geometry, queries, chunk, prefill
        self.tokenizer, self.drafts, self.device, self.log = tokenizer, drafts, device, log
        self._writer: BlockWriter | None = None
        self._evict_seconds = 0.0

    def handle(self, call: AttentionCall) -> torch.Tensor:
        assert self._writer is not None
        return self._writer(call)

    def read(self, ids: Sequence[int], rules: Rules, noise_key: int, compress_at: int | None = None) -> PromptState:
        """Read a prompt of at least one token.

        compress_at: leading tokens after which entries are evicted; default all.
        """
        context = len(ids) if compress_at is None else compress_at
        acting = rules.method.during("prefill")
        one_pass = self.prefill == "full" and acting.evicts and acting.layerwise and not acting.needs().probes
        cache = PromptCache(
            self.geometry,
            rules,
            prompt_len=len(ids),
            queries=self.queries,
            size=context if self.prefill == "full" else min(context, self.chunk),
            noise_keys=[noise_key],
            device=self.device,
            log=self.log,
        )
        observer = cache.hand_over if acting.evicts and rules.method.needs().queries == "since_last" else None
        self._evict_seconds, reading = 0.0, _Reading(cache, context)
        if one_pass:
            finished = self._timed(reading.layer_done) if acting.evicts else None
            logits = self._forward(BlockWriter(cache, self.chunk, observer, finished), ids[:context], 0)
            reading.close()
        else:
            writer = BlockWriter(cache, self.chunk, observer)
            for start in range(0, context, self.chunk):
                block = ids[start : min(start + self.chunk, context)]
                logits = self._forward(writer, block, start)
                cache.seen = start + len(block)
                if self.prefill == "chunked":
                    cache.forget_windows()
                    self._timed(reading.evict)()
            if self.prefill == "full":
                if acting.needs().probes and cache.full():
                    self._probe(acting, cache, ids[:context], logits)
                self._timed(reading.evict)()
        for start in range(context, len(ids), self.chunk):
            block = ids[start : start + self.chunk]
            logits = self._forward(BlockWriter(cache, self.chunk, observer), block, start)
            cache.seen = start + len(block)
        self._writer = None
        return PromptState(
            layers={index: layer.pack(0) for index, layer in cache.layers.items()},
            logits=logits,
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

    def _forward(self, writer: BlockWriter, tokens: Sequence[int], start: int) -> torch.Tensor:
        """Logits [V] after the last of these tokens."""
        self._writer = writer
        positions = writer.begin(start, len(tokens))
        out = self.model(
            input_ids=torch.tensor([list(tokens)], device=self.device),
            position_ids=positions[None],
            attention_mask=None,
            past_key_values=None,
            use_cache=False,
            logits_to_keep=1,
        )
        return out.logits[0, -1]

    def _probe(self, method: Any, cache: PromptCache, ids: Sequence[int], logits: torch.Tensor) -> None:
        prompt = ReadPrompt(tuple(ids), cache.allowed(), int(logits.argmax()), self.tokenizer, self.drafts)
        began = self._now()
        with one_thread(self.device):
            run_probes(method, cache, prompt, self._forward, self.chunk)
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
        if cache.acting.evicts and cache.full():
            indices, most = [g.index for g in cache.evicting], cache.allowed()
            for group in [[i] for i in indices] if cache.acting.layerwise else [indices]:
                cache.evict(group)
            check_held(cache.held(), most)
            self._note(held)

    def _note(self, before: float) -> None:
        """A decision was made; it counts as an eviction where it dropped something."""
        cache = self.cache
        cache.evictions += 1
        if cache.held() < before:
            self.dropped += 1
            self.after = max(self.after or 0.0, cache.held())
            self.first = self.first or cache.seen
