"""Reading a prompt. Three ways, one result: the packed entries of every layer, and the logits that follow.

    layer by layer   the whole prompt in one forward pass; every layer is evicted right after its attention. The
                     prompt's hidden states are those of the full cache, and the peak is one layer's full KV plus the
                     budgets.
    whole            in chunks, all layers in full until the end: for the full cache, for methods that need all layers
                     at once, and for probes. Hidden states are those of the full cache too.
    chunked          in chunks, every chunk followed by an eviction: memory is bounded for any length, but later
                     chunks read an evicted cache, so results differ from the other two (`prefill=chunked`).

With query-agnostic compression only the context is evicted; the question is read against the remaining entries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from kvbench.engine.attention.interface import RoutedModel
from kvbench.engine.cache.prompt import PromptCache
from kvbench.engine.cache.prompt_layer import PackedLayer, PromptLayer
from kvbench.engine.evict import one_thread
from kvbench.engine.model.load import load_draft
from kvbench.engine.probes import Drafts, ReadPrompt, reading, run_probes
from kvbench.engine.rules import KeptLog, Rules, check_held
from kvbench.engine.setup import Setup
from kvbench.engine.writers import BlockWriter, Heard
from kvbench.eviction.api import Probe

Prefill = Literal["full", "chunked"]


@dataclass(slots=True)
class PromptState:
    """A prompt after its evictions: the entries of each layer, and the logits [V] that follow."""

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
        """Bytes of all layers as they are handed over."""
        return sum(layer.bytes() for layer in self.layers.values())

    def bytes_extra(self) -> int:
        """The part of `bytes_left` beside keys and values."""
        return sum(layer.bytes() - layer.keys.nbytes - layer.values.nbytes for layer in self.layers.values())


class PromptReader:
    """Reads one prompt after the other, inside `with reader.model.routed()`.

    Args:
        chunk: tokens per forward pass; where the whole prompt is one pass, queries that attend at once.
        log: receives what every eviction kept.
    """

    def __init__(self, setup: Setup, *, chunk: int, prefill: Prefill = "full", log: KeptLog | None = None) -> None:
        loaded = setup.loaded
        self.setup, self.chunk, self.prefill, self.log = setup, chunk, prefill, log
        self.model = RoutedModel(loaded.model, setup.method.reads_tokens)
        self._drafts = Drafts(load_draft(loaded), loaded)

    def read(self, ids: Sequence[int], rules: Rules, noise_key: int, compress_at: int | None = None) -> PromptState:
        """Read a prompt of at least one token.

        compress_at: leading tokens after which entries are evicted; default all.
        """
        cache, logits, evictions = self._read([ids], rules, [noise_key], compress_at)
        return PromptState(
            layers={index: layer.pack(0) for index, layer in cache.layers.items()},
            logits=logits[0],
            tokens=len(ids),
            budget=rules.budget,
            held=cache.held(),
            decisions=cache.evictions,
            evictions=evictions.dropped,
            first_eviction=evictions.first,
            after_evict=evictions.after,
            entries_peak=max(evictions.peak, cache.held()),
            bytes_peak=cache.peak_bytes,
            evict_seconds=evictions.seconds,
        )

    def open(
        self, prompts: Sequence[Sequence[int]], rules: Rules, noise_keys: Sequence[int]
    ) -> tuple[PromptCache, torch.Tensor]:
        """Read equally long prompts, one where the method probes, into a cache that `go_on` adds to.

        Also returns the logits [b, V] that follow.
        """
        cache, logits, _ = self._read(prompts, rules, noise_keys, None)
        return cache, logits

    def go_on(self, cache: PromptCache, tokens: Sequence[Sequence[int]], heard: Heard | None = None) -> torch.Tensor:
        """Read the next t tokens of every sequence of an open cache; logits [b, t, V] after each of them.

        heard: see `BlockWriter`.
        """
        logits = self._forward(
            BlockWriter(cache, self.chunk, heard=heard, flash=self._flash), tokens, cache.seen, keep=0
        )
        cache.seen += len(tokens[0])
        cache.forget_windows()
        return logits

    def cache(self, rules: Rules, noise_keys: Sequence[int], length: int, size: int) -> PromptCache:
        """An empty cache for b prompts of `length` tokens, with room for `size`."""
        return PromptCache(
            self.setup.geometry,
            rules,
            prompt_len=length,
            queries=self.setup.prompt_queries,
            size=size,
            noise_keys=noise_keys,
            device=self.setup.loaded.device,
            log=self.log,
        )

    def writer(self, cache: PromptCache, finished: Callable[[PromptLayer], None] | None = None) -> BlockWriter:
        """The handler that reads a prompt into a cache. finished: see `BlockWriter`."""
        observes = cache.acting.evicts and cache.rules.method.needs().queries == "since_last"
        return BlockWriter(
            cache, self.chunk, cache.hand_over if observes else None, finished=finished, flash=self._flash
        )

    def probe(self, cache: PromptCache, ids: Sequence[int], next_token: int) -> None:
        """Run the method's probes over a prompt that was read. next_token: the greedy token that follows."""
        prompt = ReadPrompt(tuple(ids), cache.allowed(), next_token, self.setup.loaded.tokenizer, self._drafts)
        run_probes(cache, prompt, partial(self._read_probe, cache.rules.weights), self.chunk)

    @property
    def _flash(self) -> bool:
        return self.setup.loaded.attn == "flash"

    def _read(
        self, prompts: Sequence[Sequence[int]], rules: Rules, noise_keys: Sequence[int], compress_at: int | None
    ) -> tuple[PromptCache, torch.Tensor, _PromptEvictions]:
        """The cache of b prompts after their evictions, and logits [b, V]."""
        length = len(prompts[0])
        context = length if compress_at is None else compress_at
        size = context if self.prefill == "full" else min(context, self.chunk)
        cache = self.cache(rules, noise_keys, length, size)
        acting, evictions = cache.acting, _PromptEvictions(cache, context)
        probes = acting.needs().probes
        if self.prefill == "full" and acting.evicts and acting.layerwise and not probes:
            writer = self.writer(cache, partial(evictions.timed, evictions.evict_layer))
            logits = self._forward(writer, _part(prompts, 0, context), 0)
            evictions.close()
        else:
            logits = self._read_chunks(prompts, 0, context, cache, evictions if self.prefill == "chunked" else None)
            if probes and cache.full():  # never chunked: see `layout.check_prefill`
                evictions.timed(self.probe, cache, prompts[0][:context], int(logits[0].argmax()))
            if self.prefill == "full":
                evictions.timed(evictions.evict)
        if context < length:
            logits = self._read_chunks(prompts, context, length, cache)
        return cache, logits, evictions

    def _read_chunks(
        self,
        prompts: Sequence[Sequence[int]],
        start: int,
        end: int,
        cache: PromptCache,
        evictions: _PromptEvictions | None = None,
    ) -> torch.Tensor:
        """Read the tokens from `start` to `end`, with an eviction after each chunk if so wanted; logits [b, V]."""
        writer = self.writer(cache)
        for first in range(start, end, self.chunk):
            last = min(first + self.chunk, end)
            logits = self._forward(writer, _part(prompts, first, last), first)
            cache.seen = last
            if evictions is not None:
                cache.forget_windows()
                evictions.timed(evictions.evict)
        return logits

    def _forward(
        self, writer: BlockWriter, tokens: Sequence[Sequence[int]], start: int, *, keep: int = 1
    ) -> torch.Tensor:
        """Logits [b, V] after the last of the tokens [b][t]; with keep=0 [b, t, V] after every one."""
        ids = torch.tensor([list(row) for row in tokens], device=self.setup.loaded.device)
        logits = self._run(writer, start, ids.shape[1], keep, input_ids=ids)
        return logits[:, -1] if keep else logits

    def _run(self, writer: BlockWriter, start: int, rows: int, keep: int, **inputs: torch.Tensor) -> torch.Tensor:
        """Logits [b, keep, V] of the last `keep` rows; 0: of all."""
        positions = writer.begin(start, rows)[None]
        out = self.model.run(writer, **inputs, position_ids=positions, logits_to_keep=keep)
        logits: torch.Tensor = out.logits
        return logits

    def _read_probe(
        self, weights: Mapping[str, torch.Tensor], writer: BlockWriter, probe: Probe, start: int
    ) -> tuple[torch.Tensor, int]:
        """Logits [V] after the last row of a probe, and its number of rows."""
        with reading(self.model.model, probe, weights) as (inputs, rows):
            return self._run(writer, start, rows, 1, **inputs)[0, -1], rows


class _PromptEvictions:
    """The evictions of one prompt: what they left, and how long they took."""

    def __init__(self, cache: PromptCache, context: int) -> None:
        self.cache, self.context = cache, context
        self.dropped = 0
        self.first: int | None = None
        self.after: float | None = None
        self.peak = self.seconds = 0.0
        self._allowed = 0
        self._decided = False

    def evict_layer(self, layer: PromptLayer) -> None:
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
            self.cache.evictions += 1
            self._note(self.context)
            check_held(self.cache.held(), self._allowed)

    def evict(self) -> None:
        """Evict all layers together if they hold too much."""
        held = self.cache.held()
        self.peak = max(self.peak, held)
        if self.cache.reduce():
            self._note(held)

    def timed(self, work: Callable[..., None], *args: Any) -> None:
        """Do the work on one thread, and count its time."""
        device = self.cache.device
        began = now(device)
        with one_thread(device):
            work(*args)
        self.seconds += now(device) - began

    def _note(self, before: float) -> None:
        """Count a decision as an eviction if it dropped something."""
        cache = self.cache
        if cache.held() < before:
            self.dropped += 1
            self.after = max(self.after or 0.0, cache.held())
            self.first = self.first or cache.seen


def now(device: torch.device) -> float:
    """Seconds of a clock, once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _part(prompts: Sequence[Sequence[int]], start: int, end: int) -> list[Sequence[int]]:
    return [prompt[start:end] for prompt in prompts]
