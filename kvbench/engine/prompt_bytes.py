"""The bytes of a prompt while it is read, evicted and packed, estimated before it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvbench.engine.attention.geometry import LayerGeometry
from kvbench.engine.cache.layout import plan_slot_bytes
from kvbench.engine.cache.slot_cache import Shape
from kvbench.engine.model.shape import ModelShape
from kvbench.engine.scratch import Scratch
from kvbench.eviction.api import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBytes:
    """One prompt of a cell.

    In its methods, `whole` says whether one pass reads the prompt and evicts each layer right after its attention;
    otherwise, the evictions follow the passes. Heads are counted as if an eviction left equally many entries in each.

    Attributes:
        geometry: of all layers while a prompt is read; stored: of those whose entries this device holds.
        held: what a layer stores beside its entries; hidden_left: newest hidden states that it keeps.
        rows: entries per head before the eviction; left: afterwards, with the tail; tail: see `layout.Lengths`.
        block: queries of an attention call; chunked: whether an eviction follows every chunk.
    """

    shape: ModelShape
    geometry: Sequence[LayerGeometry]
    stored: Sequence[LayerGeometry]
    method: Method
    held: Shape
    hidden_left: int
    dtype: torch.dtype
    rows: int
    left: int
    tail: int
    block: int
    chunked: bool
    scratch: Scratch

    def peak(self, whole: bool, reading: int) -> int:
        """Return the most bytes. reading: those of passes and evictions, beside the cache."""
        full, after = self._cache(self.stored, self.rows), replace(self.held, rows=self.left, hidden=self.hidden_left)
        left = self._bytes(self.stored, after)
        packed = self._bytes(self.stored, replace(after, queries=0, recurrent=()))  # the rest is not copied
        if whole:
            before = left + self._one_layer(self.rows) + reading
        else:
            before = full + max(reading, self._one_layer(self.left))  # an eviction copies what stays, layer by layer
        tail = self._pass(min(self.block, self.tail), self.left, 0, not self.method.uniform) if self.tail else 0
        return max(before, left + max(packed, tail))

    def reading(self, whole: bool) -> int:
        """Return the most bytes of passes over the prompt and its probes, and of evictions, beside the cache."""
        rows, scratch = self.rows, self.scratch
        observed, decided = scratch.observed(rows, self.block), scratch.decided(rows)
        if whole:
            return self._pass(rows, rows, max(observed, decided))
        grown = self._one_layer(rows) if self.chunked else 0  # a layer is copied when it needs more room
        uneven = self.chunked and not self.method.uniform
        passes = self._pass(min(self.block, rows), rows, max(observed, grown), uneven)
        return max(passes, decided, self._probing())

    def _probing(self) -> int:
        """Return the most bytes of the method's probes: their passes, and the evicted copies that they read."""
        sizes, rows = self.scratch.probes(self.rows), self.rows
        if not sizes.longest:
            return 0
        added, copies = sizes.longest + sizes.kept, len(sizes.against)
        full = self._cache(self.stored, rows)
        evicted = self._bytes(self.stored, replace(self.held, rows=self.left, recurrent=()))
        deciding = max((self.scratch.decided(rows, method) for method in sizes.against), default=0)
        copying = (copies - 1) * evicted + full + deciding if copies else 0
        grown = self._one_layer((self.left if copies else rows) + added)
        probed = self.scratch.probed(rows, self.block, sizes.longest)
        reading = self._pass(sizes.longest, rows + added, max(probed, grown))
        return max(copying, copies * evicted + self._cache(self.stored, rows + added) - full + reading)

    def _one_layer(self, rows: int) -> int:
        evicting = sorted((g for g in self.stored if g.evicts), key=lambda g: g.entry_bytes(self.dtype.itemsize))
        return self._bytes(evicting[-1:], replace(self.held, rows=rows, recurrent=()))

    def _cache(self, layers: Sequence[LayerGeometry], rows: int) -> int:
        return self._bytes(layers, replace(self.held, rows=rows))

    def _bytes(self, layers: Sequence[LayerGeometry], held: Shape) -> int:
        return plan_slot_bytes(layers, self.method, held, self.dtype)

    def _pass(self, tokens: int, rows: int, inside: int, uneven: bool = False) -> int:
        """Return the bytes of a pass over `tokens` tokens, whose last sees `rows` entries.

        inside: bytes of what follows a layer's attention. uneven: whether heads hold different numbers of entries.
        """
        size, t = self.dtype.itemsize, min(self.block, tokens)
        mask = 0 if self.scratch.gpu else t * rows * size  # the layers share it
        kinds = {replace(g, index=0, device=None) for g in self.geometry}
        attended = max((self.scratch.attended(g, t, min(rows, g.window or rows), uneven) for g in kinds), default=0)
        widths = [
            (g.hidden, g.query_heads * g.head_dim, g.kv_heads * (g.head_dim + g.value_dim)) for g in self.geometry
        ]
        hidden, queries, entries = (tokens * size * max(of_layers) for of_layers in zip(*widths or [(0, 0, 0)]))
        acting = max(inside, self.scratch.new_tokens(tokens)) + mask
        rotating = 4 * queries + mask  # RoPE: the queries, their sums and products
        attending = 2 * hidden + entries + max(rotating, 2 * queries + max(attended, acting))
        return max(self.shape.activations(tokens, self.dtype) + mask, attending)
