"""Reads a prompt in one of three ways: layer by layer, whole, or chunked (docs/engine.md, Reading a prompt).

Each way yields the entries of every layer and the next token's logits. A pass never splits an image: a chunk ends
before an image that it would split. Only a single image that is longer than `chunk` makes a longer chunk.

With query-agnostic compression, the context is read and evicted first; then the question is read, without an eviction.

Letters: b prompts, t tokens, V logits (one per token of the vocabulary).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from kvbench.engine.attention.interface import RoutedModel
from kvbench.engine.cache.layout import layer_by_layer, pass_tokens
from kvbench.engine.cache.prompt import PromptCache
from kvbench.engine.cache.prompt_layer import PackedLayer, PromptLayer
from kvbench.engine.cache.recurrent import RecurrentStates
from kvbench.engine.evict import one_thread
from kvbench.engine.images import PromptImages, kept_shares
from kvbench.engine.probes import Drafts, ReadPrompt, reading, run_probes
from kvbench.engine.rules import KeptLog, Rules, check_held
from kvbench.engine.setup import Setup
from kvbench.engine.timer import Timer
from kvbench.engine.upload import upload
from kvbench.engine.writers import BlockWriter, Heard
from kvbench.errors import BudgetViolation
from kvbench.eviction.api import Probe
from kvbench.eviction.checks import gathered
from kvbench.eviction.modality import check_images
from kvbench.eviction.planned_device import is_gpu
from kvbench.records import Images, Request

Prefill = Literal["full", "chunked"]


class NotFinite(BudgetViolation):
    """The model's activations for a prompt are NaN or infinite, so the method could not choose entries."""


@dataclass(slots=True)
class PromptState:
    """A prompt after its evictions: its layers' entries, the next token's logits [V], and the time and memory used."""

    layers: dict[int, PackedLayer]
    logits: torch.Tensor
    tokens: int
    budget: int | None  # in entries per head of the cache
    held: float  # entries per layer and head after the evictions
    decisions: int  # how often the method decided
    evictions: int  # how many of these decisions dropped entries
    first_eviction: int | None  # tokens read before the first eviction
    after_evict: float | None  # most entries per layer and head right after an eviction
    entries_peak: float
    bytes_peak: int
    recurrent: RecurrentStates | None  # states of recurrent layers, in one row
    delta: int = 0  # the rotary position of the next token minus its index, see `images`
    kept: tuple[float, float] | None = None  # shares of text and of image tokens still held; None without images
    seconds: float = 0.0  # time to read the prompt
    evict_seconds: float = 0.0  # time for evictions and probes


class PromptReader:
    """Reads prompts inside a `with reader.model.routed()` block that the caller opens.

    Args:
        chunk: most tokens per pass if an eviction follows each pass. A pass that evicts layer by layer reads the whole
            prompt; for other passes see `layout.pass_tokens`. Passes longer than `chunk` compute attention for `chunk`
            queries at a time; `BlockWriter` describes the one exception.
        prefill: when to evict: once ("full") or after every chunk ("chunked").
        log: receives the kept positions of every eviction, see `rules.KeptLog`.
    """

    def __init__(self, setup: Setup, *, chunk: int, prefill: Prefill = "full", log: KeptLog | None = None) -> None:
        loaded = setup.loaded
        self.setup, self.chunk, self.prefill, self.log = setup, chunk, prefill, log
        self.model = RoutedModel(loaded.model, setup.method.reads_tokens or any(setup.stored_hidden))
        self._drafts = Drafts(loaded)

    def read(self, request: Request, rules: Rules) -> PromptState:
        """Read and evict a request's prompt, which must have at least one token. Raises NotFinite and ProbeTooLong."""
        ids, key = tuple(request.prompt_ids), request.noise_key(-1)
        cache, logits, evictions = self._read([ids], rules, [key], request)
        images = cache.images
        layers = {index: layer.pack(0) for index, layer in cache.layers.items()}
        held = [] if images is None else [p for g in cache.evicting for p in layers[g.index].held()]
        return PromptState(
            layers=layers,
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
            recurrent=cache.recurrent,
            delta=0 if images is None else images.delta(len(ids)),
            kept=None if images is None else kept_shares(held, images.images.spans, len(ids)),
            evict_seconds=evictions.timer.seconds(),
        )

    def open(
        self,
        prompts: Sequence[Sequence[int]],
        rules: Rules,
        noise_keys: Sequence[int],
        request: Request | None = None,
    ) -> tuple[PromptCache, torch.Tensor]:
        """Read b equally long prompts. Return their cache, which `go_on` extends, and the next token's logits [b, V].
        With a method that runs probes, or with images, b must be 1. request: as for `_read`. Raises NotFinite and
        ProbeTooLong."""
        cache, logits, _ = self._read(prompts, rules, noise_keys, request)
        return cache, logits

    def _images(self, ids: Sequence[int], images: Images | None, rules: Rules) -> PromptImages | None:
        """Return a prompt's images as the model reads them. Raises UserError if the method does not support images."""
        if images is None:
            return None
        check_images(type(rules.method).__name__, rules.method)
        return PromptImages.of(self.model.model, ids, images)

    def go_on(self, cache: PromptCache, tokens: Sequence[Sequence[int]], heard: Heard | None = None) -> torch.Tensor:
        """Read the next t tokens of every sequence of a cache, without an eviction. Return the logits [b, t, V] after
        each token. cache: a cache from `open`; heard: see `BlockWriter`."""
        writer = BlockWriter(cache, self.chunk, heard=heard, flash=self._flash)
        logits = self._forward(writer, tokens, cache.seen, keep=0)
        cache.seen += len(tokens[0])
        cache.forget_windows()
        return logits

    def cache(
        self, rules: Rules, noise_keys: Sequence[int], length: int, size: int, images: PromptImages | None = None
    ) -> PromptCache:
        """Return an empty cache for b prompts of `length` tokens, with room for `size` tokens at first."""
        return PromptCache(
            self.setup.geometry,
            rules,
            prompt_len=length,
            queries=self.setup.prompt_queries,
            hidden=self.setup.stored_hidden,
            size=size,
            noise_keys=noise_keys,
            device=self.setup.loaded.device,
            recurrent=RecurrentStates.like(self.setup.loaded.states),
            log=self.log,
            images=images,
        )

    def writer(self, cache: PromptCache, finished: Callable[[PromptLayer], None] | None = None) -> BlockWriter:
        """Return the attention handler that reads a prompt into `cache`. finished: see `BlockWriter`."""
        observes = cache.acting.evicts and cache.rules.method.needs().queries == "since_last"
        observer = cache.hand_over if observes else None
        return BlockWriter(cache, self.chunk, observer, finished=finished, flash=self._flash)

    def probe(self, cache: PromptCache, ids: Sequence[int], next_token: int) -> None:
        """Let the model read the method's probes against the cache of the prompt `ids`. next_token: the greedy token
        after the prompt. Raises ProbeTooLong."""
        prompt = ReadPrompt(tuple(ids), cache.allowed(), next_token, self._drafts, cache.reply_header)
        run_probes(cache, prompt, partial(self._read_probe, cache.rules.weights), self.chunk)

    @property
    def _flash(self) -> bool:
        return self.setup.loaded.attn == "flash"

    def _read(
        self,
        prompts: Sequence[Sequence[int]],
        rules: Rules,
        noise_keys: Sequence[int],
        request: Request | None = None,
    ) -> tuple[PromptCache, torch.Tensor, _PromptEvictions]:
        """Return the cache of b prompts after their evictions, the next token's logits [b, V], and the evictions.

        request: its `compress_at`, `images` and `reply_header` apply; None: each of them is None.
        """
        length, given = len(prompts[0]), None if request is None else request.images
        context = length if request is None or request.compress_at is None else request.compress_at
        size = context if self.prefill == "full" else min(context, self.chunk)
        cache = self.cache(rules, noise_keys, length, size, self._images(prompts[0], given, rules))
        cache.reply_header = None if request is None else request.reply_header
        evictions = _PromptEvictions(cache, context)
        try:
            self._read_context(prompts, cache, evictions)
        except BudgetViolation as error:
            if cache.finite():  # checked only now, because the check would make the host wait for a GPU
                raise
            raise NotFinite(
                "the model's activations for a prompt are NaN or infinite, so the method cannot choose entries. Try "
                "another number type (--dtype)."
            ) from error
        for layer in cache.layers.values():
            layer.forget_hidden(cache.hidden[1])
        if context < length:
            self._read_chunks(prompts, context, length, cache, None)
        cache.forget_windows()
        assert cache.logits is not None
        return cache, cache.logits, evictions

    def _read_context(self, prompts: Sequence[Sequence[int]], cache: PromptCache, evictions: _PromptEvictions) -> None:
        """Read the prompts up to the last eviction, with all evictions and probes."""
        acting, context = cache.acting, evictions.context
        if layer_by_layer(cache.rules.method, self.prefill, states=cache.recurrent is not None):
            writer = self.writer(cache, partial(evictions.timed, evictions.evict_layer))
            with gathered():
                cache.logits = self._forward(writer, [prompt[:context] for prompt in prompts], 0)
            evictions.close()
            return
        self._read_chunks(prompts, 0, context, cache, evictions if self.prefill == "chunked" else None)
        if acting.needs().probes and cache.full():  # `layout.check_prefill` refuses probes with prefill=chunked
            assert cache.logits is not None
            evictions.timed(self.probe, cache, prompts[0][:context], int(cache.logits[0].argmax()))
        if self.prefill == "full":
            evictions.timed(evictions.evict)

    def _read_chunks(
        self,
        prompts: Sequence[Sequence[int]],
        start: int,
        end: int,
        cache: PromptCache,
        evictions: _PromptEvictions | None,
    ) -> None:
        """Read the tokens from `start` up to but not including `end`, pass by pass.
        evictions: evicts after every pass; a pass then reads one chunk. None: no eviction."""
        writer, last, most = self.writer(cache), start, self.chunk
        if evictions is None and cache.images is None:  # the plan counts the images of one chunk
            most = pass_tokens(self.chunk, gpu=is_gpu(cache.device), states=cache.recurrent is not None)
        while last < end:
            first, last = last, min(last + most, end)
            if cache.images is not None:
                last = cache.images.border(first, last)
            cache.logits = self._forward(writer, [prompt[first:last] for prompt in prompts], first)
            cache.seen = last
            if evictions is not None:
                cache.forget_windows()
                evictions.timed(evictions.evict)

    def _forward(
        self, writer: BlockWriter, tokens: Sequence[Sequence[int]], start: int, *, keep: int = 1
    ) -> torch.Tensor:
        """Read `tokens` [b][t]; return the logits [b, V] after the last, or with keep=0 [b, t, V] after every token."""
        ids, images = upload(np.array(tokens, dtype=np.int64), self.setup.loaded.device), writer.cache.images
        end, given, modality = start + ids.shape[1], dict[str, torch.Tensor](), None
        if images is not None:
            given, modality = images.inputs(self.model.model, start, end), images.modality_of(start, end)
        logits = self._run(writer, start, end - start, keep, modality, input_ids=ids, **given)
        return logits[:, -1] if keep else logits

    def _run(
        self,
        writer: BlockWriter,
        start: int,
        rows: int,
        keep: int,
        modality: torch.Tensor | None = None,
        **inputs: torch.Tensor,
    ) -> torch.Tensor:
        """Read tokens or embeddings; return the logits [b, keep, V] after the last `keep` of them (keep=0: after all).
        rows: number of tokens or embeddings; inputs: the model's inputs."""
        inputs = {"position_ids": writer.begin(start, rows, modality)[None]} | inputs
        out = self.model.run(writer, writer.cache.recurrent, **inputs, logits_to_keep=keep)
        writer.cache.measure()  # once more, to count the states of layers after the last attention layer
        return out.logits

    def _read_probe(
        self, weights: Mapping[str, torch.Tensor], writer: BlockWriter, probe: Probe, start: int
    ) -> tuple[torch.Tensor, int]:
        """Read a probe. Return the logits [V] after its last token or embedding, and its length."""
        cache = writer.cache
        with reading(self.model.model, probe, weights) as (inputs, rows):
            if cache.images is not None:
                rotary = torch.arange(start, start + rows, device=cache.device) + cache.images.delta(cache.seen)
                inputs["position_ids"] = rotary[None]
            return self._run(writer, start, rows, 1, **inputs)[0, -1], rows


class _PromptEvictions:
    """Evicts one prompt, or one batch of prompts, and counts the evictions, remaining entries and seconds used."""

    def __init__(self, cache: PromptCache, context: int) -> None:
        self.cache, self.context = cache, context
        self.dropped = 0
        self.first: int | None = None
        self.after: float | None = None
        self.peak, self.timer = 0.0, Timer(cache.device)
        self._allowed: int | None = None  # entries per head that a layer may keep, once one was evicted

    def evict_layer(self, layer: PromptLayer) -> None:
        """Evict one layer that the pass does not read again, if the trigger demands an eviction (`Trigger.full`). Then
        drop the hidden states that the layer needs only for this eviction."""
        cache = self.cache
        cache.seen = self.context
        self.peak = max(self.peak, layer.held())
        if not layer.geometry.evicts:
            return
        allowed = cache.allowed()
        if cache.acting.trigger(1).full(layer.held(), allowed):
            cache.evict([layer.geometry.index])
            self._allowed = allowed
        layer.forget_hidden(cache.hidden[1])

    def close(self) -> None:
        """If a layer was evicted, count all `evict_layer` calls as one eviction, and check the budget of all layers."""
        if self._allowed is not None:
            self.cache.evictions += 1
            self._note(self.context)
            check_held(self.cache.held(), self._allowed)

    def evict(self) -> None:
        """Evict all layers if the method must evict (`PromptCache.full`)."""
        held = self.cache.held()
        self.peak = max(self.peak, held)
        if self.cache.reduce():
            self._note(held)

    def timed(self, work: Callable[..., None], *args: Any) -> None:
        """Call `work`, and add its time to the seconds used. On a CPU it runs on one thread, see `one_thread`."""
        with self.timer.running(), one_thread(self.cache.device):
            work(*args)

    def _note(self, before: float) -> None:
        """Count the last eviction if it dropped entries. before: mean number of entries per head before it."""
        cache = self.cache
        if cache.held() < before:
            self.dropped += 1
            self.after = max(self.after or 0.0, cache.held())
            self.first = self.first or cache.seen
