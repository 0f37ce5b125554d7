"""The attention that a few queries pay to cached entries: one primitive behind every attention-based score.

Float32 throughout, causal by absolute position (the cache is not in text order and may be compressed), padding-aware, blockwise
over queries so that scratch memory is bounded. Naming of the choices: `specs` call them domain, order and reductions.
"""

from __future__ import annotations

from typing import Literal

from kvbench.lazy import torch

Domain = Literal["all", "outside_window"]
Order = Literal["softmax_then_group", "group_then_softmax"]
Reduce = Literal["mean", "sum", "max"]

SCRATCH_FLOATS = 1 << 25  # 128 MiB of logits at a time


def window_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    valid: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    domain: Domain = "all",
    order: Order = "softmax_then_group",
    reduce_g: Reduce | None = "mean",
    reduce_q: Reduce | None = "mean",
) -> torch.Tensor:
    """Softmax attention of queries to cached keys, reduced over the query heads of a group and over the queries.

    Args:
        queries: [b, Hq, w, d] post-RoPE; query head h serves KV head h // (Hq // Hk).
        keys: [b, Hk, N, d] post-RoPE.
        query_positions: [b, w] absolute; key_positions: [b, Hk, N] absolute; a query sees keys at its position or before.
        valid: [b, Hk, N] bool; other entries get weight 0.
        scaling, softcap: the model's own softmax scale and logit cap.
        domain: keys that the softmax runs over: "all", or "outside_window" (those older than the first query).
        order: "softmax_then_group" reduces probabilities over the group, "group_then_softmax" reduces logits.
        reduce_g, reduce_q: over the g query heads and the w queries; None keeps that axis.

    Returns:
        float32 [b, Hk, N]; with an axis kept, [b, Hk, g, N], [b, Hk, w, N] or [b, Hk, g, w, N].
    """
    b, hq, w, d = queries.shape
    hk, n = keys.shape[1:3]
    g = hq // hk
    visible = valid
    if domain == "outside_window":
        visible = visible & (key_positions < query_positions.amin(dim=1)[:, None, None])
    block = max(1, min(w, SCRATCH_FLOATS // max(1, b * hq * n)))
    keys_t = keys.float().transpose(-1, -2)  # [b, Hk, d, N]
    grouped = queries.view(b, hk, g, w, d)
    parts = []
    for start in range(0, w, block):
        q = grouped[:, :, :, start : start + block].float()
        rows = q.shape[3]
        logits = (q.reshape(b, hk, g * rows, d) @ keys_t).view(b, hk, g, rows, n) * scaling
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        qpos = query_positions[:, None, start : start + block, None]  # [b, 1, rows, 1]
        seen = visible[:, :, None] & (key_positions[:, :, None] <= qpos)  # [b, Hk, rows, N]
        parts.append(_reduce_group(logits, seen, order, reduce_g))
    if reduce_q is None:
        return torch.cat(parts, dim=-2)
    if len(parts) == 1:
        return _reduce(parts[0], reduce_q, dim=-2)
    if reduce_q == "max":
        return torch.stack([p.amax(dim=-2) for p in parts]).amax(dim=0)
    total = torch.stack([p.sum(dim=-2) for p in parts]).sum(dim=0)
    return total / w if reduce_q == "mean" else total


def _reduce_group(logits: torch.Tensor, seen: torch.Tensor, order: Order, how: Reduce | None) -> torch.Tensor:
    """[b, Hk, g, w, N] logits to probabilities, reduced over the group to [b, Hk, w, N] unless `how` is None."""
    if order == "group_then_softmax":
        if how is None:
            raise ValueError("order 'group_then_softmax' reduces logits over the group and needs reduce_g")
        return _softmax(_reduce(logits, how, dim=2), seen)
    probabilities = _softmax(logits, seen[:, :, None])
    return probabilities if how is None else _reduce(probabilities, how, dim=2)


def _softmax(logits: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Softmax over visible entries; a row that sees nothing is all zeros instead of NaN."""
    logits = logits.masked_fill(~seen, float("-inf"))
    probabilities = torch.softmax(logits, dim=-1)
    return probabilities.masked_fill(~seen, 0.0)


def _reduce(x: torch.Tensor, how: Reduce, dim: int) -> torch.Tensor:
    if how == "max":
        return x.amax(dim=dim)
    return x.mean(dim=dim) if how == "mean" else x.sum(dim=dim)
