"""The bytes of a prompt while it is read, evicted and packed, estimated before it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvbench.engine.attention.geometry import LayerGeometry
from kvbench.engine.attention.sdpa import WIDEST
from kvbench.engine.cache.layout import plan_slot_bytes
from kvbench.engine.cache.slot_cache import Shape
from kvbench.engine.model.shape import ModelShape
from kvbench.engine.scratch import Scratch
from kvbench.eviction.api import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptBytes:
    """Computes the bytes of a cell's longest prompt on one device.

    In its methods, `whole` says whether one pass reads the whole prompt and evicts layer by layer
    (`layout.layer_by_layer`); if not, evictions follow the passes. After an eviction, all heads are counted with the
    same number of entries.

    Attributes:
        geometry: all layers. In place of the model's sliding window, `window` is the number of entries per head that
            the layer holds while a prompt is read. stored: the layers of `geometry` whose entries this device
            holds.
        held: what each layer stores beside keys and values before its eviction (`held.rows` is ignored). hidden_left:
            how many of the newest hidden states each layer still stores after its eviction.
        rows: entries per head before the eviction; left: entries per head after it, with the tail; tail: tokens that
            are read after the eviction (`layout.Lengths`).
        block: the most tokens of a chunk; also the most queries in a call of the observer or of masked attention.
        chunked: whether an eviction follows each chunk; unevicted: most tokens of a pass if no eviction lies between
            passes (`layout.pass_tokens`).
        scratch: counts the bytes of attention and of the method's code.
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
    unevicted: int
    scratch: Scratch

    def peak(self, whole: bool, reading: int) -> int:
        """Return the most bytes that the prompt and its cache take. reading: most bytes beside the cache while the
        prompt is read."""
        full, left = self._cache(self.rows), self.read()
        evicting = self._one_layer(self.left)  # an eviction copies what stays, layer by layer
        before = left + reading if whole else full + max(reading, evicting)
        tail = self._pass(min(self.unevicted, self.tail), self.left, 0, not self.method.uniform) if self.tail else 0
        return max(before, left + max(self._packed(), tail))

    def read(self) -> int:
        """Return the bytes of the prompt's cache after the prompt was read and evicted."""
        return self._bytes(self.stored, self._after())

    def _packed(self) -> int:
        """Return the bytes that packing copies in all layers: positions, and whole entries if heads are uneven."""
        if self.method.uniform:
            return sum(4 * g.kv_heads * (self.left if g.evicts else self.rows) for g in self.stored)
        return self._bytes(self.stored, replace(self._after(), queries=0, recurrent=()))

    def reading(self, whole: bool) -> int:
        """Return the most bytes beside the cache, in passes over the prompt, in probes and in evictions."""
        rows, scratch = self.rows, self.scratch
        observed, decided = scratch.observed(rows, self.block), scratch.decided(rows)
        if whole:
            shared = [g for g in self.stored if g.evicts and g.shared_by]  # evicted after the last layer that shares
            full, left = (self._bytes(shared, replace(self.held, rows=n, recurrent=())) for n in (rows, self.left))
            return full - left + self._pass(rows, rows, max(observed, decided), layer=self._one_layer(rows))
        grown = self._one_layer(rows) if self.chunked else 0  # a layer is copied when it needs more room
        uneven = self.chunked and not self.method.uniform
        tokens = min(self.block if self.chunked else self.unevicted, rows)
        passes = self._pass(tokens, rows, max(observed, grown), uneven)
        return max(passes, decided, self._probing())

    def _probing(self) -> int:
        """Return the most bytes beside the prompt's cache while probes are read against it or its evicted copies."""
        sizes, rows = self.scratch.probes(self.rows), self.rows
        if not sizes.longest:
            return 0
        added, copies = sizes.longest + sizes.kept, len(sizes.against)
        full = self._cache(rows)
        evicted = self._bytes(self.stored, replace(self.held, rows=self.left, recurrent=()))
        deciding = max((self.scratch.decided(rows, method) for method in sizes.against), default=0)
        copying = (copies - 1) * evicted + full + deciding if copies else 0
        grown = self._one_layer((self.left if copies else rows) + added)
        probed = self.scratch.probed(rows, self.block, sizes.longest)
        reading = self._pass(sizes.longest, rows + added, max(probed, grown))
        return max(copying, copies * evicted + self._cache(rows + added) - full + reading)

    def _after(self) -> Shape:
        return replace(self.held, rows=self.left, hidden=self.hidden_left)

    def _one_layer(self, rows: int) -> int:
        evicting = sorted((g for g in self.stored if g.evicts), key=lambda g: g.entry_bytes(self.dtype.itemsize))
        return self._bytes(evicting[-1:], replace(self.held, rows=rows, recurrent=()))

    def _cache(self, rows: int) -> int:
        return self._bytes(self.stored, replace(self.held, rows=rows))

    def _bytes(self, layers: Sequence[LayerGeometry], held: Shape) -> int:
        return plan_slot_bytes(layers, self.method, held, self.dtype)

    def _pass(self, tokens: int, rows: int, inside: int, uneven: bool = False, layer: int = 0) -> int:
        """Return the bytes that a pass over `tokens` tokens takes beside the cache; its last token sees `rows` entries.

        inside: most bytes that it takes to grow a layer, to observe its queries or to evict it.
        uneven: whether heads hold different numbers of entries.
        layer: bytes of the entries that a layer holds from its attention until its eviction, if the pass evicts
        layer by layer.
        """
        size, t = self.dtype.itemsize, min(self.block, tokens)
        kinds = {replace(g, index=0, device=None) for g in self.geometry}
        maskless = self.scratch.gpu and not uneven and all(g.causal for g in kinds)
        mask = 0 if maskless else t * rows * size  # the layers share it
        attended = max((self._attended(g, tokens, rows, uneven) for g in kinds), default=0)
        widths = [
            (g.hidden, g.head_dim, g.query_heads * g.head_dim, g.kv_heads * (g.head_dim + g.value_dim))
            for g in self.geometry
        ]
        largest = (tokens * size * max(of_layers) for of_layers in zip(*widths or [(0, 0, 0, 0)]))
        hidden, angles, queries, entries = largest
        held = 3 * hidden + 2 * angles + entries  # the embeddings, the layer's input and its norm; cosines and sines
        attended += mask if tokens > t else 0  # of the block before
        rotating = 4 * queries + mask  # RoPE: the queries, their sums and products
        storing = queries + mask + self.scratch.new_tokens(tokens)
        attending = 2 * queries + max(attended, inside + mask)  # the queries and the output
        layers = held + max(rotating, layer + max(storing, attending))
        return max(self.shape.activations(tokens, self.dtype) + mask, layers)

    def _attended(self, g: LayerGeometry, tokens: int, rows: int, uneven: bool) -> int:
        """Return the bytes that a layer's attention takes beside its queries and output, see `_pass`."""
        maskless = self.scratch.gpu and g.causal and not uneven
        counted = []
        if maskless and g.head_dim <= WIDEST and (g.shared_by or not self.scratch.observes):  # all queries at once
            output = tokens * g.query_heads * g.read_dim * self.dtype.itemsize
            counted.append(self.scratch.attended(g, tokens, rows, uneven) - output)
        if not counted or self.scratch.observes:
            counted.append(self.scratch.attended(g, min(self.block, tokens), min(rows, g.window or rows), uneven))
        return max(counted)
