"""The bytes that a cell allocates (weights, slots, prompt, scratch), estimated before it runs."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvbench.engine.attention.geometry import LayerGeometry
from kvbench.engine.cache.layout import layer_by_layer, plan_slot_bytes
from kvbench.engine.cache.slot_cache import Shape
from kvbench.engine.model.packing import packed_from
from kvbench.engine.model.shape import ModelShape, Part
from kvbench.engine.scratch import Scratch, Ticks
from kvbench.eviction.api import Method

FLOAT = 4  # bytes; logits and scores are computed in float32
MOST = 1 << 20  # slots that are ever counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Planned bytes of one cell on one device.

    Attributes:
        weights: bytes of the model's weights; packed: bytes of a second copy, in memory with `packed_from` slots or
            more (`packing`).
        slot: bytes of one slot's cache; step: bytes of a decode step per slot; graph: whether a CUDA graph keeps the
            step's memory between steps.
        prompt: bytes of the prompt being read, with its activations, until its entries are in a slot.
        ticks: scratch bytes of evictions while decoding.
    """

    weights: int
    slot: int
    step: int
    prompt: int
    ticks: Ticks
    graph: bool = True
    packed: int = 0
    packed_from: int = 0

    def at(self, slots: int) -> int:
        """Return the planned peak of bytes with this many slots."""
        steps, evicting = slots * self.step, self.ticks.at(slots)
        held = self.weights + slots * self.slot + self.packed * (slots >= self.packed_from)
        return held + (steps + max(self.prompt, evicting) if self.graph else max(steps, self.prompt, evicting))

    def fitting(self, usable: int) -> int:
        """Return how many slots fit into `usable` bytes; 0 if not even one does."""
        return bisect.bisect_right(range(1, MOST), usable, key=self.at)


def footprint(
    shape: ModelShape,
    geometry: Sequence[LayerGeometry],
    method: Method,
    held: Shape,
    dtype: torch.dtype,
    *,
    prompt_rows: int,
    budget: int | None,
    interval: int,
    block: int,
    prefill: str,
    at_once: int,
    gpu: bool,
    images: tuple[int, int] = (0, 0),
    part: Part | None = None,
) -> Footprint:
    """Estimate a cell's bytes on one device.

    geometry, held: the geometry and the entries of one slot's cache. prompt_rows: most entries per head while a prompt
    is read. budget: in entries. block, prefill: `chunk` and `prefill` of `prefill.PromptReader`. images: two numbers,
    the most bytes that the model's vision part holds while it reads a prompt's images, and the bytes that remain
    afterwards (`tower.tower_bytes`). at_once: most bytes for a view of several layers or slots (`stack.scratch_bytes`).
    gpu: whether to count for a GPU. part: what the device holds of the model; None: all.
    """
    whole = layer_by_layer(method, prefill, states=bool(shape.states))
    stored, weights = geometry, shape.weight_bytes(dtype.itemsize)
    if part is not None:  # activations, logits and scratch count on every device
        stored, weights = [g for g in geometry if g.index in part.layers], part.parameters * dtype.itemsize
        held = replace(held, recurrent=tuple(s for s in held.recurrent if s.layer in part.layers))
    packs = None if gpu or part or shape.stored else packed_from(weights, dtype)
    scratch = Scratch(
        method=method,
        geometry=tuple(g for g in geometry if g.evicts),
        model=shape.weightless,
        dtype=dtype,
        gpu=gpu,
        interval=interval,
        budget=held.rows if budget is None else budget,
    )
    states = max(held.hidden, min(method.during("prefill").needs().prompt_hidden, prompt_rows))
    kept = held.hidden if whole else states  # in every layer
    prompt = _Prompt(
        shape=shape,
        geometry=_wide(stored, block, prompt_rows, prefill),
        method=method,
        held=replace(held, hidden=kept),
        dtype=dtype,
        rows=prompt_rows,
        block=block,
        scratch=scratch,
    )
    reading = prompt.reading(whole) + (states - kept) * max(g.hidden for g in geometry) * dtype.itemsize
    return Footprint(
        weights=weights,
        slot=plan_slot_bytes(stored, method, held, dtype),
        step=_step(shape, geometry, held.rows, dtype, gathered=not method.uniform),
        prompt=prompt.peak(whole, max(reading + images[1], images[0])),
        ticks=scratch.of_ticks(held, at_once),
        graph=gpu,
        packed=shape.packable * dtype.itemsize if packs else 0,
        packed_from=packs or 0,
    )


def _wide(geometry: Sequence[LayerGeometry], block: int, rows: int, prefill: str) -> list[LayerGeometry]:
    """Return the layers as they are while a prompt is read: sliding windows hold more entries, or the whole prompt."""
    more = block if prefill == "chunked" else rows
    return [g if g.window is None else replace(g, window=min(g.window + more, rows)) for g in geometry]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prompt:
    """The bytes of one prompt while it is read, evicted and packed.

    geometry: of the layers while a prompt is read; rows: entries per head; block: queries of an attention call.
    `whole`: whether one pass reads the prompt and evicts each layer right after its attention; otherwise, the evictions
    follow the passes.
    """

    shape: ModelShape
    geometry: Sequence[LayerGeometry]
    method: Method
    held: Shape
    dtype: torch.dtype
    rows: int
    block: int
    scratch: Scratch

    def peak(self, whole: bool, reading: int) -> int:
        """Return the most bytes. reading: those of passes and evictions, beside the cache."""
        left = min(self.held.rows, self.rows)
        packed = self._cache(self.geometry, left)
        if not whole:
            return self._cache(self.geometry, self.rows) + packed + reading
        one = next(g for g in self.geometry if g.evicts)
        longest = left if self.method.uniform else min(self.rows, left * one.kv_heads)  # shorter heads are padded
        return self._cache(self.geometry, longest) + max(self._cache([one], self.rows) + reading, packed)

    def reading(self, whole: bool) -> int:
        """Return the most bytes of passes over the prompt and its probes, and of evictions, beside the cache."""
        rows, observed, decided = (
            self.rows,
            self.scratch.observed(self.rows, self.block),
            self.scratch.decided(self.rows),
        )
        if whole:
            return self._pass(rows, rows, max(observed, decided))
        probe, probed = self.scratch.probed(rows, self.block)
        probes = self._cache(self.geometry, probe) + self._pass(probe, rows + probe, probed) if probe else 0
        return max(self._pass(min(self.block, rows), rows, observed), decided, probes)

    def _cache(self, layers: Sequence[LayerGeometry], rows: int) -> int:
        return plan_slot_bytes(layers, self.method, replace(self.held, rows=rows, queries=0), self.dtype)

    def _pass(self, tokens: int, rows: int, inside: int) -> int:
        """Return the bytes of a pass over `tokens` tokens, whose last sees `rows` entries. inside: bytes beside those
        of attention."""
        size = self.dtype.itemsize
        mask = min(self.block, tokens) * rows * size
        copies = mask * max(g.query_heads // g.kv_heads for g in self.geometry)  # only on a CPU, but counted everywhere
        attention = max(
            g.hidden + g.query_heads * g.head_dim + g.kv_heads * (g.head_dim + g.value_dim) for g in self.geometry
        )
        attending = 2 * attention * tokens * size + max(copies, inside)
        return mask + max(self.shape.activations(tokens, self.dtype), attending)


def _step(shape: ModelShape, geometry: Sequence[LayerGeometry], rows: int, dtype: torch.dtype, gathered: bool) -> int:
    """Return the bytes that a slot adds to a decode step: activations, logits and noise, attention of one layer.

    rows: entries per head; gathered: whether a layer's entries are copied into one tensor before attention reads them.
    """
    vocabulary = shape.vocabulary * (dtype.itemsize + 2 * FLOAT)
    weights = max(g.query_heads for g in geometry) * rows * (dtype.itemsize + 2 * FLOAT)
    copied = max(g.kv_heads * (g.head_dim + g.value_dim) for g in geometry) * rows * dtype.itemsize if gathered else 0
    return shape.activations(1, dtype) + vocabulary + weights + copied
