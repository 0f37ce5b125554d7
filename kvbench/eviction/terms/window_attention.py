"""Attention of a few queries to cached entries, from which every attention-based score is made.

It is float32 throughout, causal by absolute position (the cache is not in text order and may have gaps), ignores
invalid entries, and works in blocks of queries to bound scratch memory. Methods differ in domain, order and reductions.
"""

from __future__ import annotations

from typing import Literal

from kvbench.lazy import torch

Domain = Literal["all", "outside_window"]
Order = Literal["softmax_then_group", "group_then_softmax"]
Reduce = Literal["mean", "sum", "max"]

# Logits in memory at a time: at most 128 MiB. On a CPU, blocks hold fewer sequences: small buffers are reused, while
# the fresh pages of large buffers would cost more than the arithmetic.
SCRATCH_FLOATS = 1 << 25
CPU_BLOCK_FLOATS = 1 << 17


def window_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    valid: torch.Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    domain: Domain = "all",
    order: Order = "softmax_then_group",
    reduce_g: Reduce | None = "mean",
    reduce_q: Reduce | None = "mean",
    own_keys: torch.Tensor | None = None,
    own_positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return softmax attention of queries to cached keys, reduced over the query heads of a group and over the queries.

    float32 [b, Hk, N]; with an axis kept, [b, Hk, g, N], [b, Hk, w, N] or [b, Hk, g, w, N].

    Args:
        queries: [b, Hq, w, d] post-RoPE; query head h serves KV head h // (Hq // Hk).
        keys: [b, Hk, N, d] post-RoPE.
        query_positions: [b, w]; key_positions: [b, Hk, N]; absolute; a query sees keys at its position or before.
        valid: [b, Hk, N] bool; other entries get weight 0. None: all are valid.
        scaling, softcap: the model's softmax scale and logit cap.
        domain: keys that the softmax runs over: "all", or "outside_window" (keys older than the first query).
        order: "softmax_then_group" reduces probabilities over the group, "group_then_softmax" reduces logits.
        reduce_g, reduce_q: over the g query heads and the w queries; None keeps that axis.
        own_keys, own_positions: [b, Hk, m, d] and [b, m], keys outside the cache. They take part in the softmax but not
            in the result.
    """
    b, hq, w, _ = queries.shape
    entries = keys.shape[2]
    if own_keys is not None and own_positions is not None:
        if valid is None:
            valid = torch.ones_like(key_positions, dtype=torch.bool)
        more = own_positions[:, None].expand(-1, keys.shape[1], -1)
        keys, key_positions = torch.cat([keys, own_keys], dim=2), torch.cat([key_positions, more], dim=2)
        valid = torch.cat([valid, torch.ones_like(more, dtype=torch.bool)], dim=2)
    n = keys.shape[2]
    visible = valid
    if domain == "outside_window":
        older = key_positions < query_positions.amin(dim=1)[:, None, None]
        visible = older if valid is None else valid & older
    blind = _blind(visible, key_positions, query_positions)
    # Rows per block must not depend on b, or sums would depend on the batch.
    rows = max(1, min(w, SCRATCH_FLOATS // max(1, hq * n)))
    block = CPU_BLOCK_FLOATS if keys.device.type == "cpu" else SCRATCH_FLOATS
    sequences = max(1, block // max(1, hq * n * rows))
    parts = []
    for first in range(0, b, sequences):
        s = slice(first, first + sequences)
        sums: list[torch.Tensor] = []
        for start in range(0, max(w, 1), rows):  # without queries the sums are zeros
            r = slice(start, start + rows)
            hidden = None if visible is None else ~visible[s, :, None]  # [b, Hk, 1, N]
            if domain == "all":  # keys older than the window are never in a query's future
                future = key_positions[s, :, None] > query_positions[s, None, r, None]
                hidden = future if hidden is None else future.logical_or_(hidden)
            assert hidden is not None
            logits = _logits(queries[s, :, r], keys[s], scaling, softcap)
            reduced = _reduce_group(logits, hidden, order, reduce_g)[..., :entries]
            if blind is not None:
                gap = blind[s, :, r, None] if reduce_g else blind[s, :, None, r, None]
                reduced = reduced.masked_fill(gap, 0.0)
            sums.append(reduced)
        parts.append(_join(sums, reduce_q))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out / w if reduce_q == "mean" else out


def _blind(
    visible: torch.Tensor | None, key_positions: torch.Tensor, query_positions: torch.Tensor
) -> torch.Tensor | None:
    """Return the mask of queries that see no key, [b, Hk, w] bool; on a CPU None if every query sees one.

    The caller replaces the NaN softmax of such queries by 0. Only a CPU is asked whether there are any, because other
    devices would have to be waited for.
    """
    if visible is not None:
        key_positions = key_positions.masked_fill(~visible, torch.iinfo(key_positions.dtype).max)
    blind = key_positions.amin(dim=-1)[:, :, None] > query_positions[:, None]
    return blind if blind.device.type != "cpu" or bool(blind.any()) else None


def _logits(queries: torch.Tensor, keys: torch.Tensor, scaling: float, softcap: float | None) -> torch.Tensor:
    """Return the logits of queries [b, Hq, r, d] and keys [b, Hk, N, d] as [b, Hk, g, r, N].

    The queries of a group are stacked, so each KV head needs one matrix product.
    """
    b, hq, r, d = queries.shape
    hk, n = keys.shape[1:3]
    stacked = queries.reshape(b, hk, hq // hk * r, d).float() * scaling
    logits = (stacked @ keys.float().transpose(-1, -2)).view(b, hk, hq // hk, r, n)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _join(blocks: list[torch.Tensor], how: Reduce | None) -> torch.Tensor:
    """Join results of blocks of r queries, [..., r, N], as `how` says; a mean is a sum that the caller divides."""
    if how is None:
        return torch.cat(blocks, dim=-2)
    reduced = [_reduce(block, "max" if how == "max" else "sum", dim=-2) for block in blocks]
    total = reduced[0]
    for part in reduced[1:]:
        total = torch.maximum(total, part) if how == "max" else total + part
    return total


def _reduce_group(logits: torch.Tensor, hidden: torch.Tensor, order: Order, how: Reduce | None) -> torch.Tensor:
    """Turn logits [b, Hk, g, r, N] into probabilities, reduced over the group to [b, Hk, r, N] unless `how` is None.

    hidden: bool [b, Hk, r or 1, N], keys that a query does not see. The probabilities of a query that sees no key are
    NaN.
    """
    if order == "group_then_softmax":
        if how is None:
            raise ValueError("order 'group_then_softmax' reduces logits over the group and needs reduce_g")
        return torch.where(hidden, float("-inf"), _reduce(logits, how, dim=2)).softmax(dim=-1)
    probabilities = torch.where(hidden[:, :, None], float("-inf"), logits).softmax(dim=-1)
    return probabilities if how is None else _reduce(probabilities, how, dim=2)


def _reduce(x: torch.Tensor, how: Reduce, dim: int) -> torch.Tensor:
    if how == "max":
        return x.amax(dim=dim)
    return x.mean(dim=dim) if how == "mean" else x.sum(dim=dim)
