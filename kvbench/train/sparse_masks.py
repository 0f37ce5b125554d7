"""What every token could see while entries were evicted, for one plain forward pass over the finished sequence.

    lifetimes = Lifetimes()
    Engine(loaded, method, ..., log=lifetimes)               # or TraceReader(..., log=lifetimes)
    handler = SparseAttention(lifetimes.tables([keys of each sequence], length))
    logits = forward(model, handler, input_ids=ids)          # those that the engine saw

An evicted entry never comes back. All that a mask says of an entry is therefore the first token that no longer sees it:

    query t sees entry j   <=>   j <= t < until_j

`until` is a row of numbers for each head where a mask is a square. Masks exist inside a layer's attention only, for a
block of queries at a time, each layer's from its own evictions. The log comes after a compression and names what it
left: with n tokens read, token n is the first that sees less, and token n - 1, at which the compression happened, has
still seen all that was held.

Letters: b sequences, H heads with entries of their own (KV heads, or query heads where the method has it so), n
tokens, t queries of a block.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from kvbench.engine.attention.interface import AttentionCall, grouped_attention

NEVER = torch.iinfo(torch.int32).max  # evicted
ROWS = 1024  # queries that attend at once


class Lifetimes:
    """Collects evictions: pass it as the `log` of an engine or a reader."""

    def __init__(self) -> None:
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
        """`until` [b, H, length] of every layer that evicted.

        keys: the noise keys under which each sequence was logged: its prompt's and its own.
        """
        layers: dict[int, torch.Tensor] = {}
        for row, key in ((row, key) for row, names in enumerate(keys) for key in names):
            for layer, until in self._until.get(key, {}).items():
                if layer not in layers:
                    size = len(keys), until.shape[0], length
                    layers[layer] = torch.full(size, NEVER, dtype=torch.int32, device=until.device)
                mine = layers[layer][row, :, : until.shape[1]]
                mine.copy_(torch.minimum(mine, until[:, :length]))
        return layers


def visible(until: torch.Tensor, first: int, count: int, window: int | None = None) -> torch.Tensor:
    """[b, H, count, first + count] bool: what the queries from `first` on see. until: [b, H, first + count or more]."""
    queries = torch.arange(first, first + count, device=until.device)[:, None]
    age = queries - torch.arange(first + count, device=until.device)
    near = age >= 0 if window is None else (age >= 0) & (age < window)
    return near & (queries < until[:, :, None, : first + count])


class SparseAttention:
    """Answers every layer's attention over whole sequences, as `train.forward` wants it.

    Where there are more than `rows` queries the gradient computes a block's attention again, so that no more than one
    block's mask and probabilities are held.

    Args:
        until: as `Lifetimes.tables`; a layer that is not there is causal.
    """

    def __init__(self, until: Mapping[int, torch.Tensor], rows: int = ROWS) -> None:
        self.until, self.rows = until, rows

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        n = call.key.shape[2]
        until = self.until.get(call.layer)
        if until is None:
            until = torch.full((1, 1, n), NEVER, dtype=torch.int32, device=call.key.device)
        else:
            call = call.for_heads(until.shape[1])
        parts = []
        for first in range(0, n, self.rows):
            last = min(first + self.rows, n)
            tensors = call.query[:, :, first:last], call.key[:, :, :last], call.value[:, :, :last]
            attend = partial(_attend, call, until, first)
            again = n > self.rows and torch.is_grad_enabled()
            parts.append(checkpoint(attend, *tensors, use_reentrant=False) if again else attend(*tensors))
        return torch.cat(parts, dim=1)


def _attend(
    call: AttentionCall,
    until: torch.Tensor,
    first: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    """Attention [b, t, Hq, Dv] of a block of queries to all keys up to its last."""
    seen = visible(until, first, query.shape[2], call.window)
    bias = torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill_(~seen, float("-inf"))
    return grouped_attention(query, key, value, bias, scaling=call.scaling, softcap=call.softcap, sinks=call.sinks)
