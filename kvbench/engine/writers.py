"""`BlockWriter`: the attention handler that reads prompts. It writes new entries to a cache, then attends to the cache.

Letters: b prompts, t new tokens, r queries of one attention call, Hq query heads, Hk KV heads, D and Dv dimensions of a
key and a value.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvbench.engine.attention.flash import flash_attention
from kvbench.engine.attention.grouped import causal_bias
from kvbench.engine.attention.interface import AttentionCall
from kvbench.engine.attention.sdpa import WIDEST, newest_rows
from kvbench.engine.cache.prompt import PromptCache
from kvbench.engine.cache.prompt_layer import PromptLayer
from kvbench.engine.replicas import Replicas
from kvbench.eviction.modality import MODALITY
from kvbench.eviction.planned_device import on_gpu

# Gets (layer, queries [b, Hq, r, D], their positions [r], the last position + 1, number of entries that the last query
# sees).
Observer = Callable[[PromptLayer, torch.Tensor, torch.Tensor, int, int], None]
Heard = Callable[[AttentionCall, torch.Tensor], None]  # gets (a layer's attention call, its output [b, t, Hq, Dv])


class BlockWriter:
    """Appends t tokens to a prompt's cache and attends causally.

    Args:
        block: most queries per attention call, and per call of the observer. On a GPU, an attention call gets all
            queries at once if its mask needs no memory, the observer does not get the queries, and the head dimension
            is at most `WIDEST`.
        observer: called with each block of queries of an evicted layer, once the block's keys are in the cache.
        finished: called with each layer once the forward pass does not read it again: after its attention or, if later
            layers attend to its entries, after the attention of the last of them.
        heard: called with each layer's own attention call and its output.
        flash: whether to use flash-attn, in the layers that the module `flash` names.
    """

    def __init__(
        self,
        cache: PromptCache,
        block: int,
        observer: Observer | None = None,
        *,
        finished: Callable[[PromptLayer], None] | None = None,
        heard: Heard | None = None,
        flash: bool = False,
    ) -> None:
        self.cache, self.block, self.observer, self.flash = cache, block, observer, flash
        self.finished, self.heard = finished, heard
        self.start, self._positions = 0, Replicas(torch.empty(0, dtype=torch.int64))
        self.modality: torch.Tensor | None = None
        self._bias: tuple[object, torch.Tensor] | None = None

    def begin(self, start: int, count: int, modality: torch.Tensor | None = None) -> torch.Tensor:
        """Prepare to read `count` tokens from position `start`; return their positions [count]. modality: [count] or
        [b, 1, count], the tokens' values of the column `modality`; None: all tokens are text."""
        self.start, self.modality = start, modality
        positions = torch.arange(start, start + count, device=self.cache.device)
        self._positions, self._bias = Replicas(positions), None
        return positions

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        layer = self.cache.layer(call.layer, call.key)
        last = call.layer == layer.geometry.attending[-1]
        call = layer.geometry.adapt(call)
        if call.stores:
            self._append(layer, call)
        before = layer.rows - call.key.shape[2]
        parts, at = [], self._positions.on(call.query.device)
        block = self._block(layer, call)
        for first in range(0, call.query.shape[2], block):
            r = slice(first, first + block)
            asked, positions = call.part(tokens=r), at[r]
            rows = before + first + len(positions)
            if self.observer is not None and call.stores and layer.geometry.evicts:
                self.observer(layer, asked.query, positions, self.start + first + len(positions), rows)
            parts.append(self._attend(layer, asked, self.start + first, rows))
        if self.finished is not None and last:
            self.finished(layer)
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        if self.heard is not None and call.stores:
            self.heard(call, out)
        return out

    def _append(self, layer: PromptLayer, call: AttentionCall) -> None:
        before = layer.rows
        layer.append(call.key, call.value, call.query, self.start, call.hidden)
        for name, value in self.cache.rules.columns_of_new_tokens(layer.geometry, call).items():
            layer.columns[name][:, :, before : layer.rows] = value
        if self.modality is not None and MODALITY.name in layer.columns:
            layer.columns[MODALITY.name][:, :, before : layer.rows] = self.modality
        self.cache.measure()

    def _block(self, layer: PromptLayer, call: AttentionCall) -> int:
        """Return the most queries per attention call, see `block` of the class."""
        observed = self.observer is not None and call.stores and layer.geometry.evicts
        whole = self._maskless(layer, call) and call.query.shape[-1] <= WIDEST and not observed
        return call.query.shape[2] if whole else self.block

    def _maskless(self, layer: PromptLayer, call: AttentionCall) -> bool:
        """Return whether a layer's attention runs on a GPU and needs no mask that takes memory."""
        return on_gpu(call.query) and layer.geometry.causal and layer.valid is None

    def _attend(self, layer: PromptLayer, call: AttentionCall, start: int, rows: int) -> torch.Tensor:
        """Return the attention output [b, r, Hq, Dv] of the call's r queries, which see at most the layer's first
        `rows` entries. start: position of the first query."""
        queries, keys, values = call.query, layer.keys[:, :, :rows], layer.values[:, :, :rows]
        whole = rows == start + queries.shape[2]  # no entry was dropped: entry j has position j
        gapless = layer.valid is None and (whole or call.window is None)
        alike = keys.shape[-1] == values.shape[-1] and call.latent is None
        if self.flash and gapless and call.sinks is None and alike:
            return flash_attention(
                queries, keys, values, scaling=call.scaling, softcap=call.softcap, window=call.window
            )
        bias = self._mask(layer, start, queries.shape[2], rows, call)
        return call.attend(queries, keys, values, bias)

    def _mask(self, layer: PromptLayer, start: int, count: int, rows: int, call: AttentionCall) -> torch.Tensor | None:
        """Return the mask that `_attend` gives to attention.

        If the layer needs no mask that takes memory (`_maskless`), the result is that of `newest_rows`: a causal mask
        that stores no elements, or None. For any other layer it is an additive mask [b or 1, Hk or 1, count, rows].
        Layers with the same window and equally many entries in every head share an additive mask.
        """
        if self._maskless(layer, call):
            return newest_rows(count, rows)
        first = start - self.start
        positions = self._positions.on(call.query.device)[first : first + count]
        if layer.valid is not None:
            seen = layer.positions[:, :, :rows]
            return causal_bias(positions, seen, call.window, call.query.dtype, layer.valid[:, :, :rows])
        # If all heads hold equally many entries, all entries but those of the block's own tokens are older than the
        # block. So the mask needs their true positions only for a sliding window.
        key = (start, count, rows, call.window, call.query.device)
        if self._bias is None or self._bias[0] != key:
            if call.window is None:
                seen = torch.arange(rows, device=positions.device) + (start + count - rows)
            else:
                seen = layer.positions[0, 0, :rows]
            self._bias = (key, causal_bias(positions, seen, call.window, call.query.dtype)[None, None])
        return self._bias[1]
