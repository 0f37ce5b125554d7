"""The bytes that a cell allocates (weights, slots, prompt, scratch), estimated before it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvbench.engine.attention.geometry import LayerGeometry
from kvbench.engine.cache.layout import layer_by_layer, plan_slot_bytes
from kvbench.engine.cache.slot_cache import Shape
from kvbench.engine.model.shape import ModelShape, Part
from kvbench.eviction.api import Method
from kvbench.eviction.terms.value_norm import PRODUCT_FLOATS

FLOAT = 4  # bytes; logits and scores are computed in float32
SCORE_PIECE = 1 << 26  # most pairs of entries that a score computes at a time, one float32 each


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Planned bytes of one cell on one device.

    Attributes:
        weights: bytes of the model's weights.
        slot: bytes of one slot's cache; step: bytes of a decode step per slot. A CUDA graph keeps the step's memory.
        prompt: bytes of the prompt being read, with its activations, until its entries are in a slot.
        evict: scratch bytes of the largest eviction per evicted slot, at most `evict_most` for all slots together;
            evict_fixed: scratch beside that, for any number of slots.
    """

    weights: int
    slot: int
    step: int
    prompt: int
    evict: int
    evict_most: int
    evict_fixed: int

    def at(self, slots: int) -> int:
        """Return the planned peak of bytes with this many slots."""
        evicting = min(slots * self.evict, self.evict_most) + self.evict_fixed
        return self.weights + slots * (self.slot + self.step) + max(self.prompt, evicting)

    def fitting(self, usable: int) -> int:
        """Return how many slots fit into `usable` bytes; 0 or less if not even one does."""
        rest = usable - self.weights
        reading = (rest - self.prompt) // (self.slot + self.step)
        few = (rest - self.evict_fixed) // (self.slot + self.step + self.evict)
        many = (rest - self.evict_fixed - self.evict_most) // (self.slot + self.step)
        return int(min(reading, max(few, many)))


def footprint(
    shape: ModelShape,
    geometry: Sequence[LayerGeometry],
    method: Method,
    held: Shape,
    dtype: torch.dtype,
    *,
    prompt_rows: int,
    block: int,
    prefill: str,
    scratch: int,
    images: tuple[int, int] = (0, 0),
    part: Part | None = None,
) -> Footprint:
    """Estimate a cell's bytes on one device.

    geometry, held: the geometry and the entries of one slot's cache. prompt_rows: most entries per head while a prompt
    is read. block, prefill: `chunk` and `prefill` of `prefill.PromptReader`. images: two numbers, the most
    bytes that the model's vision part holds while it reads a prompt's images, and the bytes that remain afterwards
    (`tower.tower_bytes`). scratch: most bytes for a view of several layers or slots (`stack.scratch_bytes`).
    part: what the device holds of the model; None: all.
    """
    whole = layer_by_layer(method, prefill, states=bool(shape.states))
    stored, weights = geometry, shape.weight_bytes(dtype.itemsize)
    if part is not None:  # activations, logits and scratch count on every device
        stored, weights = [g for g in geometry if g.index in part.layers], part.parameters * dtype.itemsize
        held = replace(held, recurrent=tuple(s for s in held.recurrent if s.layer in part.layers))
    states = max(held.hidden, min(method.during("prefill").needs().prompt_hidden, prompt_rows))
    kept = held.hidden if whole else states  # in every layer
    prompt = plan_slot_bytes(stored, method, replace(held, rows=prompt_rows, queries=0, hidden=kept), dtype)
    packed = plan_slot_bytes(stored, method, replace(held, rows=min(held.rows, prompt_rows), queries=0), dtype)
    tokens = prompt_rows if whole else min(block, prompt_rows)  # of a forward pass
    reading = shape.activations(tokens, dtype) + _mask(geometry, block, prompt_rows) * dtype.itemsize
    reading += (states - kept) * max(g.hidden for g in geometry) * dtype.itemsize
    scoring = _scoring(geometry, prompt_rows) + _pairs(geometry, prompt_rows) if method.evicts else 0
    if method.needs().layer_weights:  # products of values, and their magnitudes
        reading += 2 * FLOAT * min(PRODUCT_FLOATS, tokens * shape.width)
    row = _scoring(geometry, held.rows) if method.evicts else 0
    acting = method.during("decode")
    together = sum(g.evicts for g in geometry) if acting.stacked and acting.layerwise else 1  # layers in a view
    return Footprint(
        weights=weights,
        slot=plan_slot_bytes(stored, method, held, dtype),
        step=_step(shape, geometry, held.rows, dtype, gathered=not method.uniform),
        prompt=prompt + packed + max(reading + scoring + images[1], images[0]),
        evict=together * row,
        evict_most=max(row, scratch) if acting.layerwise else sys.maxsize,
        evict_fixed=_pairs(geometry, held.rows) if method.evicts else 0,
    )


def _step(shape: ModelShape, geometry: Sequence[LayerGeometry], rows: int, dtype: torch.dtype, gathered: bool) -> int:
    """Return the bytes that a slot adds to a decode step: activations, logits and noise, attention of one layer.

    rows: entries per head; gathered: whether a layer's entries are copied into one tensor before attention reads them.
    """
    vocabulary = shape.vocabulary * (dtype.itemsize + 2 * FLOAT)
    weights = max(g.query_heads for g in geometry) * rows * (dtype.itemsize + 2 * FLOAT)
    copied = max(g.kv_heads * (g.head_dim + g.value_dim) for g in geometry) * rows * dtype.itemsize if gathered else 0
    return shape.activations(1, dtype) + vocabulary + weights + copied


def _mask(geometry: Sequence[LayerGeometry], block: int, rows: int) -> int:
    """Return how many numbers the mask of a block of queries over `rows` entries holds, together with its copies.

    block: number of queries. There is a copy for each query head of a group. Only a CPU makes these copies; they are
    counted on every device.
    """
    return min(block, rows) * rows * (1 + max(g.query_heads // g.kv_heads for g in geometry))


def _scoring(geometry: Sequence[LayerGeometry], rows: int) -> int:
    """Return the bytes that scoring one layer of one sequence takes: its keys in float32, and two products as large."""
    return 3 * FLOAT * rows * max(g.kv_heads * g.head_dim for g in geometry)


def _pairs(geometry: Sequence[LayerGeometry], rows: int) -> int:
    """Return the scratch bytes for scoring pairs (two entries, or a query and an entry) in one layer."""
    return 2 * FLOAT * min(SCORE_PIECE, max(g.query_heads for g in geometry) * rows * rows)
