"""Attention of queries to stored keys, in PyTorch's own operations, and masks for it.

Attention does not copy a KV head for each of its g query heads. The g query heads either become g queries of one head,
or read the same memory (`sdpa`).

Bit equality on CPU (measured): linear layers map a vector to the same bits at any place in the batch, beside any other
vectors, and with any number of threads. Batched matrix products do so too if their shape is fixed.
`scaled_dot_product_attention` does so only with one thread. The number of entries that attention reads changes the last
bits of its result. This number may therefore depend on the sequence, but never on the other sequences of the batch.

Letters: b sequences or slots, t queries of each, n keys, Hq query heads, Hk KV heads, g query heads per KV head, D and
Dv dimensions of a key and a value.
"""

from __future__ import annotations

import torch

from kvbench.engine.attention.sdpa import grouped_sdpa
from kvbench.eviction.planned_device import on_gpu


def grouped_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    sums: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the attention [b, t, Hq, Dv] of a block of queries to stored keys.

    Args:
        query: [b, Hq, t, D]; keys: [b, Hk, n, D]; values: [b, Hk, n, Dv].
        bias: added to the logits, broadcastable to [b, Hk, t, n], -inf for hidden keys; dtype of `query`. None: no
            key is hidden. On a GPU, without softcap, sinks and sums, also a mask from `sdpa.newest_rows`.
        sinks: [Hq] logits of a virtual key without value.
        sums: [b, Hk, g, n] float32. The function adds each query head's attention weights to it; t must then be 1. The
            virtual key takes no share of these weights, as in `LayerView.attend`.
    """
    b, hq, t, d = query.shape
    hk = keys.shape[1]
    q = query.reshape(b, hk, hq // hk, t, d)
    plain = softcap is None and sinks is None and sums is None
    if plain and (on_gpu(query) or (query.dtype == torch.float32 and t > 1)):
        out = grouped_sdpa(q, keys, values, bias, scaling)
    else:  # with few queries on a CPU, matrix products are also faster than SDPA, in bfloat16 several times
        out = _matmul_attention(q, keys, values, bias, scaling, softcap, sinks, sums)
    return out.permute(0, 3, 1, 2, 4).reshape(b, t, hq, -1)


def _matmul_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    sums: torch.Tensor | None,
) -> torch.Tensor:
    """Return the attention [b, Hk, g, t, Dv], with float32 logits. q: [b, Hk, g, t, D]; the other arguments are those
    of `grouped_attention`."""
    logits = (q.flatten(2, 3) @ keys.transpose(-1, -2)).view(*q.shape[:-1], -1)  # [b, Hk, g, t, n]
    logits = logits.float().mul_(scaling)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if bias is not None:
        logits += bias[:, :, None]
    if sinks is not None:  # one more logit in the denominator
        sink = sinks.float().view(*q.shape[1:3], 1, 1)
        logits = torch.cat([logits, sink.expand(*logits.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., : keys.shape[2]]
    if sums is not None:
        paid = weights if sinks is None else torch.softmax(logits[..., : keys.shape[2]], dim=-1)
        sums += paid[..., 0, :]
    return (weights.to(values.dtype).flatten(2, 3) @ values).view(*q.shape[:-1], -1)


def causal_bias(
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    window: int | None,
    dtype: torch.dtype,
    valid: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return an additive mask [..., t, n]: 0 where a query sees a key, -inf elsewhere.

    A query sees valid keys at its own and earlier positions; with a `window`, only at the newest `window` of these
    positions. query_positions: [t]; key_positions: [..., n]; valid: [..., n] bool, False for padding, None: all valid.
    """
    age = query_positions[:, None] - key_positions[..., None, :]
    hidden = age < 0
    if window is not None:
        hidden = hidden | (age >= window)
    if valid is not None:
        hidden = hidden | ~valid[..., None, :]
    return torch.zeros(age.shape, dtype=dtype, device=age.device).masked_fill_(hidden, float("-inf"))


def live_bias(live: torch.Tensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Return an additive mask [S, Hk or 1, 1, rows] that hides the cache rows without an entry. live: [S, Hk or 1, 1],
    how many cache rows hold an entry; these rows come first. rows: number of all cache rows."""
    hidden = torch.arange(rows, device=live.device) >= live
    bias = torch.zeros(hidden.shape, dtype=dtype, device=live.device).masked_fill_(hidden, float("-inf"))
    return bias[:, :, None]
