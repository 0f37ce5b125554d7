"""Attention masks that reproduce evictions in one plain forward pass over a finished sequence.

An evicted entry never returns. So one number per entry, `until`, describes the mask: the position of the first token
that no longer sees the entry.

    query t sees entry j   <=>   j <= t < until_j

`until` has n numbers per head, but a mask has n x n. So masks are built inside each layer's attention, for one block of
queries at a time. The engine logs which entries each eviction keeps. If m tokens were read before an eviction, the
token at position m is the first that sees only the kept entries; the token at position m - 1 still saw all.

Letters: b sequences, H heads of the cache, n tokens. H counts KV heads, but query heads for methods that keep entries
per query head.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from kvbench.engine.attention.interface import AttentionCall
from kvbench.train.forward import ROWS, in_blocks

NEVER = torch.iinfo(torch.int32).max  # the value of `until` for entries that are never evicted


class Lifetimes:
    """Records when each entry was evicted. Pass it as `log` to an engine or a trace reader.

    homes: for each layer, the layer that stores the entries to which it attends (`geometry.homes`).
    """

    def __init__(self, homes: Mapping[int, int]) -> None:
        self.homes = homes
        self._until: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)  # noise key -> layer -> [H, tokens seen]

    def __call__(self, key: int, seen: int, layer: int, kept: list[torch.Tensor]) -> None:
        until = torch.full((len(kept), seen), NEVER, dtype=torch.int32, device=kept[0].device)
        if (before := self._until[key].get(layer)) is not None:
            until[:, : before.shape[1]] = before
        gone = until == NEVER
        for head, positions in enumerate(kept):
            gone[head, positions.long()] = False
        self._until[key][layer] = until.masked_fill_(gone, seen)

    def clear(self) -> None:
        self._until.clear()

    def tables(self, keys: Sequence[Sequence[int]], length: int) -> dict[int, torch.Tensor]:
        """Return `until` [b, H, length], the first token that no longer sees an entry, for every layer that attends to
        entries of which some were evicted.

        keys: for each sequence, the noise key of its prompt and that of its sample; the sequence's evictions were
        recorded under these keys.
        """
        layers: dict[int, torch.Tensor] = {}
        for row, key in ((row, key) for row, names in enumerate(keys) for key in names):
            for layer, until in self._until.get(key, {}).items():
                if layer not in layers:
                    size = len(keys), until.shape[0], length
                    layers[layer] = torch.full(size, NEVER, dtype=torch.int32, device=until.device)
                mine = layers[layer][row, :, : until.shape[1]]
                mine.copy_(torch.minimum(mine, until[:, :length]))
        return {layer: layers[home] for layer, home in self.homes.items() if home in layers}


def visible(until: torch.Tensor, first: int, count: int, window: int | None = None) -> torch.Tensor:
    """Return the mask [b, H, count, first + count] that says which entries each query sees.

    The queries have the positions `first` to first + count - 1. until: for each entry, the position of the first query
    that no longer sees it, [b, H, first + count or more]. window: the length of the layer's sliding window.
    """
    queries = torch.arange(first, first + count, device=until.device)[:, None]
    age = queries - torch.arange(first + count, device=until.device)
    near = age >= 0 if window is None else (age >= 0) & (age < window)
    return near & (queries < until[:, :, None, : first + count])


class SparseAttention:
    """Computes attention in which every query sees only the entries that were not yet evicted from its head.

    Args:
        until: the tables of `Lifetimes.tables` by layer; layers without a table use the model's causal attention.
        rows: queries per attention call.
    """

    def __init__(self, until: Mapping[int, torch.Tensor], rows: int = ROWS) -> None:
        self.until, self.rows = until, rows

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        until = self.until.get(call.layer)
        if until is None:
            until = torch.full((1, 1, call.key.shape[2]), NEVER, dtype=torch.int32, device=call.key.device)
        else:
            call = call.for_heads(until.shape[1])
        return in_blocks(call, partial(_attend, call, until), self.rows)


plain = SparseAttention({})  # the model's causal attention, with its sliding windows


def _attend(
    call: AttentionCall,
    until: torch.Tensor,
    first: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    seen = visible(until, first, query.shape[2], call.window)
    bias = torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill_(~seen, float("-inf"))
    return call.attend(query, key, value, bias)
