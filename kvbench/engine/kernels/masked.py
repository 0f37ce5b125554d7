"""A decode step's attention in PyTorch's own operations. It reads all cache rows; a mask hides the empty ones.

For the letters see `backends`.
"""

from __future__ import annotations

import torch

from kvbench.engine.attention.grouped import grouped_attention, live_bias
from kvbench.engine.cache.paged import PAGE


def decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    lengths: torch.Tensor,
    live: torch.Tensor,
    *,
    scaling: float,
    splits: int,
    table: torch.Tensor | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    latent: int = 0,
    sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write each live slot's new entry and return the attention [S, Hq, Dv]; see `backends.Decode`."""
    slots, heads = key.shape[:2]
    rows = keys.shape[2] if table is None else table.shape[2] * PAGE
    for store, new in ((keys, key), (values, value)):
        write(store, new, lengths, live, rows, table)
    if table is not None:
        every = flat_rows(torch.arange(rows, device=table.device).expand(slots, heads, rows), rows, table)
        keys, values = keys[every], values[every]
    if latent:
        values = keys[..., :latent]
    bias = live_bias(lengths[..., None] + 1, rows, query.dtype)
    paid = None if sums is None else torch.zeros_like(sums)
    out = grouped_attention(
        *(query[:, :, None], keys, values, bias),
        scaling=scaling,
        softcap=softcap,
        sinks=sinks,
        sums=paid,
    )
    if sums is not None and paid is not None:
        sums += torch.where(live[:, None, None, None] != 0, paid, 0)
    return torch.where(live[:, None, None] != 0, out[:, 0], 0)


def write(
    store: torch.Tensor,
    new: torch.Tensor,
    lengths: torch.Tensor,
    live: torch.Tensor,
    rows: int,
    table: torch.Tensor | None = None,
) -> None:
    """Write `new` [S, Hk, D], the keys or the values of the new entries, to `store`: for each head of a live slot, at
    cache row n % `rows`, where n is the head's number in `lengths`. rows: cache rows per head; the other arguments are
    as in `backends.Decode`."""
    at = flat_rows(lengths.expand(new.shape[:2]) % rows, rows, table)
    flat = store.view(store.shape[:-1].numel(), store.shape[-1])  # width 0 for values of latent layers without indexer
    flat[at] = torch.where(live[:, None, None] != 0, new, flat[at])


def flat_rows(n: torch.Tensor, rows: int, table: torch.Tensor | None) -> torch.Tensor:
    """Return the indices of the cache rows `n` [S, Hk, ...] of each head in the flat keys or values [-1, D]."""
    slots, heads = n.shape[:2]
    if table is None:
        head = torch.arange(slots * heads, device=n.device).view(slots, heads, *(1,) * (n.ndim - 2))
        return head * rows + n
    pages = table.long().gather(2, (n // PAGE).view(slots, heads, -1)).view(n.shape)
    return pages * PAGE + n % PAGE
