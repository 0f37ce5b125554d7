"""The KV cache of a prompt, with its evictions, while the model reads the prompt or, in a replay, also the answer.

A layer may be evicted as soon as the forward pass has read it for the last time, mostly right after its attention.
Peak memory is then the full KV of one layer plus the budgets of the other layers.

Letters: b prompts of equal length (one, except in `EvictionCache` and in a replay), Hk KV heads, n entries per head, D
head dimension. `rows`: a number of entries per head, counted from the first in storage order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from kvbench.engine.attention.geometry import LayerGeometry
from kvbench.engine.cache.prompt_layer import PromptLayer
from kvbench.engine.cache.recurrent import RecurrentStates
from kvbench.engine.images import PromptImages
from kvbench.engine.rules import Batch, KeptLog, Rules, allowed, check_held
from kvbench.engine.upload import upload
from kvbench.eviction import noise, select
from kvbench.eviction.api import Method, Probe
from kvbench.eviction.checks import gathered, read
from kvbench.eviction.returned import observed
from kvbench.eviction.view import LayerView


class PromptCache:
    """The KV caches of b equally long prompts, with all their layers.

    Args:
        queries: how many of the newest queries every evicted layer stores.
        hidden: how many of the newest hidden states every evicted layer stores while the prompt is read, and how many
            afterwards.
        size: the tokens for which each layer allocates memory at first.
        noise_keys: per prompt, the seed of the method's random numbers.
        recurrent: states of recurrent layers, which the passes continue.
        images: the prompt's images, with which b must be 1; None: no images.
    """

    def __init__(
        self,
        geometry: Sequence[LayerGeometry],
        rules: Rules,
        *,
        prompt_len: int,
        queries: int,
        hidden: tuple[int, int],
        size: int,
        noise_keys: Sequence[int],
        device: torch.device,
        recurrent: RecurrentStates | None = None,
        log: KeptLog | None = None,
        images: PromptImages | None = None,
    ) -> None:
        self.geometry, self.rules, self.size, self.log = geometry, rules, size, log
        self.queries, self.hidden = queries, hidden
        self.acting = rules.method.during("prefill")
        self._hidden_seen = self.acting.needs().prompt_hidden  # number of newest hidden states in a view
        self.evicting = [g for g in geometry if g.evicts]
        self.ordinals = {g.index: i for i, g in enumerate(self.evicting)}
        self.layers: dict[int, PromptLayer] = {}
        self.prompt_len, self.seen, self.evictions = prompt_len, 0, 0
        self.noise_keys = [noise.signed64(key) for key in noise_keys]
        self.device, self.recurrent, self.images = device, recurrent, images
        self.peak_bytes = 0
        self.logits: torch.Tensor | None = None  # [b, V] after the prompt's newest token; None before the first pass
        self.prompt_rows: dict[int, int] = {}  # layer -> entries per head of the prompt, without probes
        self.extra = 0  # tokens of kept probes
        self.reply_header: tuple[int, ...] | None = None  # of the prompt, for probes; see `Request.reply_header`
        self._held_by_layer: tuple[int, ...] = ()  # for views, while `reduce` runs
        self._by_index = {index: g for g in geometry for index in g.attending}
        self._facts: tuple[object, tuple[torch.Tensor, ...]] | None = None  # of the last view, see `_facts_on`

    def layer(self, index: int, like: torch.Tensor) -> PromptLayer:
        """Return the `PromptLayer` to whose entries the model's layer `index` attends: its own, or that of an earlier
        layer (`LayerGeometry.shared_by`). The first use creates a `PromptLayer` with the dtype and device of `like`."""
        g = self._by_index[index]
        if g.index not in self.layers:
            b = len(self.noise_keys)
            stored = self.queries, self.hidden[0]
            self.layers[g.index] = PromptLayer(g, b, self.size, self.rules.method, *stored, like)
            self.measure()
        return self.layers[g.index]

    def measure(self) -> None:
        self.peak_bytes = max(
            self.peak_bytes, sum(layer.bytes() for layer in self.layers.values()) + self.state_bytes()
        )

    def state_bytes(self) -> int:
        """Return the bytes of the states of recurrent layers."""
        return self.recurrent.bytes() if self.recurrent is not None else 0

    def allowed(self) -> int:
        return allowed(self.acting, self.rules.budget, self.prompt_len, self.seen, self.evictions)

    def view(
        self,
        layer: PromptLayer,
        queries: torch.Tensor,
        query_positions: torch.Tensor,
        rows: int,
        probe: Probe | None = None,
        own: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> LayerView:
        """Build the method's view of the first `rows` entries per head of a layer. probe: the probe that the model
        reads, None outside probes; own: keys and positions of the probe's tokens."""
        b = len(self.noise_keys)
        seen, prompt_len, evictions, noise_key = self._facts_on(layer.keys.device)
        batch = Batch(
            seen=seen,
            longest=self.seen,
            prompt_len=prompt_len,
            evictions=evictions,
            noise_key=noise_key,
            allowed=self.allowed() if probe is None else self.rules.budget or 0,
        )
        return self.rules.view(
            layer.geometry,
            self.ordinals,
            layer.shown(rows),
            batch,
            queries=queries,
            query_positions=query_positions.expand(b, -1),
            # [b, w, hidden size]; w: as many of the newest as are stored, but at most `_hidden_seen`
            hidden=layer.hidden[:, 0, -self._hidden_seen :] if self._hidden_seen and probe is None else None,
            states=layer.states,
            held_by_layer=self._held_by_layer,
            probe=probe,
            probe_keys=own[0] if own else None,
            probe_positions=own[1].expand(b, -1) if own else None,
        )

    def hand_over(
        self, layer: PromptLayer, queries: torch.Tensor, positions: torch.Tensor, end: int, rows: int
    ) -> None:
        """Let the method observe a block of queries of the prompt. end: the position of the last query + 1. This query
        sees the first `rows` entries of every head."""
        before, self.seen = self.seen, end
        layer.write(observed(self.rules.method, self.view(layer, queries, positions, rows)))
        self.seen = before

    def full(self) -> bool:
        """Return whether the layers hold so many entries that the method must evict."""
        return any(g.index in self.layers for g in self.evicting) and self.acting.trigger(1).full(
            self.held(), self.allowed()
        )

    def evict(self, indices: Sequence[int]) -> None:
        """Ask the method which entries of these layers to keep, and drop the others."""
        for layer, verdict, counts in self._decide(self.acting, [self.layers[i] for i in indices]):
            layer.write(verdict.columns)
            if self.log is not None:
                for i, key in enumerate(self.noise_keys):
                    heads = zip(layer.positions[i, :, : layer.rows], verdict.keep[i])
                    self.log(key, self.seen, layer.geometry.index, [p[k] for p, k in heads])
            layer.keep(verdict.keep, counts)

    def reduce(self) -> bool:
        """Evict all layers if the method evicts and the cache is full now. Return whether they were evicted."""
        if not (self.acting.evicts and self.full()):
            return False
        indices, most = [g.index for g in self.evicting], self.allowed()
        self._held_by_layer = tuple(int(self.layers[i].held()) for i in indices)
        with gathered():
            for group in [[i] for i in indices] if self.acting.layerwise else [indices]:
                self.evict(group)
        self._held_by_layer = ()
        check_held(self.held(), most)
        self.evictions += 1
        return True

    def begin_decoding(self, noise_keys: Sequence[int]) -> None:
        """Evict by the rules for decoding from now on, with these noise keys: the prompt ends and generation begins."""
        self.rules = self.rules.decoding()
        self.acting = self.rules.method
        self._hidden_seen = self.acting.needs().hidden
        self.noise_keys = [noise.signed64(key) for key in noise_keys]

    def tick(self, growth: int | None) -> None:
        """If the method needs every query, let it observe the queries since the last tick. Then call `reduce`. growth:
        number of tokens read since the last tick; None: 0."""
        if self.acting.needs().queries == "since_last":
            for g in self.evicting:
                layer = self.layers[g.index]
                newest = self._newest_queries(layer, min(growth or 0, layer.queries.shape[2]))
                self.hand_over(layer, *newest, self.seen, layer.rows)
        self.reduce()

    def evicted_by(self, method: Method) -> PromptCache:
        """Return a copy of the cache for probes. `method` evicts from it, down to as many entries as may stay of the
        prompt (`allowed`). Nothing is evicted if the trigger of `method` demands no eviction."""
        rules = replace(self.rules, method=method, budget=self.allowed(), weights={}, elsewhere={})
        other = PromptCache(
            self.geometry,
            rules,
            prompt_len=self.prompt_len,
            queries=self.queries,
            hidden=self.hidden,
            size=0,
            noise_keys=self.noise_keys,
            device=self.device,
            recurrent=self.recurrent,
            images=self.images,
        )
        other.seen = self.seen
        other.layers = {i: layer.copy() for i, layer in self.layers.items()}
        if other.full():
            layers = [other.layers[g.index] for g in other.evicting]
            with gathered():
                for layer, verdict, counts in other._decide(method, layers):
                    layer.keep(verdict.keep, counts)
        both = sum(layer.bytes() for cache in (self, other) for layer in cache.layers.values())
        self.peak_bytes = max(self.peak_bytes, both + self.state_bytes())
        return other

    def forget_windows(self) -> None:
        """In layers with a sliding window, drop the entries that the window no longer covers."""
        for g in self.geometry:
            if g.window is not None:
                self.layers[g.index].forget_before(self.seen - g.window + 1, self.seen)

    def finite(self) -> bool:
        """Return whether all that the layers store is finite (`PromptLayer.finite`) and no logit is NaN. The host waits
        for the device.

        The logits count too, because the layers may have dropped the entries with NaN. A logit may be -inf.
        """
        nan = self.logits is not None and bool(self.logits.isnan().any())
        return not nan and all(layer.finite() for layer in self.layers.values())

    def held(self) -> float:
        """Return the number of entries that a head holds, a mean over the heads of all layers that are evicted."""
        layers = [self.layers[g.index] for g in self.evicting if g.index in self.layers]
        return sum(layer.total() for layer in layers) / max(1, sum(layer.heads() for layer in layers))

    def _facts_on(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return `seen`, `prompt_len`, `evictions` and `noise_keys` on a device, each [b]. Consecutive views with the
        same numbers share the tensors, so each layer needs no new copy to the device."""
        b = len(self.noise_keys)
        facts = [[self.seen] * b, [self.prompt_len] * b, [self.evictions] * b, self.noise_keys]
        if self._facts is None or self._facts[0] != (device, facts):
            self._facts = (device, facts), upload(np.array(facts, dtype=np.int64), device).unbind()
        return self._facts[1]

    def _newest_queries(self, layer: PromptLayer, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the newest `count` queries of a layer, and their positions."""
        positions = torch.arange(self.seen - count, self.seen, device=layer.keys.device)
        return layer.queries[:, :, layer.queries.shape[2] - count :], positions

    def _decide(
        self, method: Method, layers: Sequence[PromptLayer]
    ) -> Iterator[tuple[PromptLayer, select.Decision, np.ndarray]]:
        """Yield each layer with the method's decision about it, and how many entries each head keeps, [b, Hk]."""
        newest = [self._newest_queries(layer, method.needs().width) for layer in layers]
        views = [self.view(layer, *queries, layer.rows) for layer, queries in zip(layers, newest)]
        decisions = select.decide(method, views)
        return zip(layers, decisions, _kept_counts(decisions))


def _kept_counts(decisions: Sequence[select.Decision]) -> list[np.ndarray]:
    """Return how many entries each head keeps, [b, Hk] for each decision. The host waits once, if at all."""
    known = [decision.count for decision in decisions]
    if None not in known:
        return [np.full(decision.keep.shape[:2], count) for decision, count in zip(decisions, known)]
    sizes = [decision.keep.sum(dim=-1) for decision in decisions]
    numbers = read(torch.cat([size.flatten().to(sizes[0].device) for size in sizes])).numpy()
    ends = np.cumsum([size.numel() for size in sizes])
    return [part.reshape(size.shape) for part, size in zip(np.split(numbers, ends[:-1]), sizes)]
