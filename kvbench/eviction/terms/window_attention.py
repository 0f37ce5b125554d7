"""Attention of queries to the cached entries. Methods that score entries by attention call `window_attention` through
`LayerView.attend`, except `golden`, `expected-attention`, `triattention` and the presses of kvpress.

All arithmetic is in float32. On a GPU, Triton kernels compute the attention for the engine (`window_attention_kernel`),
unless its backend is `torch`. Absolute positions decide which keys a query sees, because the cache is not in text order
and may have gaps. Invalid entries are ignored. Queries are processed in blocks, which bounds the scratch memory.
Methods differ in the arguments `domain`, `order`, `reduce_g` and `reduce_q` of `window_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Literal

from kvbench.eviction.planned_device import on_gpu
from kvbench.lazy import torch

Domain = Literal["all", "outside_window"]
Order = Literal["softmax_then_group", "group_then_softmax"]
Reduce = Literal["mean", "sum", "max", "min"]

# Logits in memory at a time: at most 128 MiB. On a CPU, blocks hold fewer sequences: small buffers are reused, while
# the fresh pages of large buffers would cost more than the arithmetic.
SCRATCH_FLOATS = 1 << 25
CPU_BLOCK_FLOATS = 1 << 17
LARGEST = 512  # bytes of a key in the Triton kernel, so that its tiles fit into shared memory
MOST_HEADS = 64  # query heads of a group in the Triton kernel
LOGITS_NEED_A_REDUCTION = "order 'group_then_softmax' reduces logits over the group; give reduce_g, not None"
HIDDEN = 1e30  # times a distance of -1 or less, this makes a logit that the softmax turns into 0


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
    newest: Sequence[int] = (),
    kernels: bool = False,
) -> torch.Tensor:
    """Return softmax attention of queries to cached keys, reduced over the query heads of a group and over the queries.

    The result is float32 [b, Hk, N]; with an axis kept, [b, Hk, g, N], [b, Hk, w, N] or [b, Hk, g, w, N].

    Args:
        queries: [b, Hq, w, d] post-RoPE; query head h serves KV head h // (Hq // Hk).
        keys: [b, Hk, N, d] post-RoPE.
        query_positions: [b, w]; key_positions: [b, Hk, N]; absolute; a query sees keys at its position or before.
        valid: [b, Hk, N] bool; other entries get weight 0. None: all are valid.
        scaling, softcap: the model's softmax scale and logit cap.
        domain: keys that the softmax runs over: "all", or "outside_window" (keys older than the first query).
        order: "softmax_then_group" reduces probabilities over the group, "group_then_softmax" reduces logits.
        reduce_g, reduce_q: how to reduce over the g query heads and the w queries; None keeps the axis.
        own_keys, own_positions: [b, Hk, m, d] and [b, m], keys outside the cache. They take part in the softmax but not
            in the result.
        newest: for each number n, return the sum over the newest n queries, in an axis before N. `reduce_q` must be
            "sum".
        kernels: whether Triton kernels, which need a GPU, may compute the result. With `own_keys`, with "min", and for
            very large keys or groups, torch computes it in any case.
    """
    if newest and reduce_q != "sum":
        raise ValueError(f'sums over the newest queries need reduce_q="sum"; got {reduce_q!r}')
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
    # A key that no query may see is infinitely far in the future. float32 holds positions below 2^24 exactly.
    times = key_positions.float()
    times = times if visible is None else times.masked_fill(~visible, float("inf"))
    served = own_keys is None and "min" not in (reduce_g, reduce_q) and 0 < hq <= MOST_HEADS * keys.shape[1] and w > 0
    if kernels and served and keys.shape[-1] * keys.element_size() <= LARGEST:
        out = _by_kernel(queries, keys, times, query_positions, scaling, softcap, order, reduce_g, reduce_q, newest)
        return out / w if reduce_q == "mean" else out
    blind = _blind(times, query_positions)
    # Sums over both axes may be taken in any order, and over the queries first they are cheaper.
    queries_first = order == "softmax_then_group" and {reduce_g, reduce_q} <= {"mean", "sum"}
    at_once = None if queries_first else reduce_g
    # Rows per block must not depend on b, or sums would depend on the batch.
    rows = max(1, min(w, SCRATCH_FLOATS // max(1, hq * n)))
    block = SCRATCH_FLOATS if on_gpu(keys) else CPU_BLOCK_FLOATS
    sequences = max(1, block // max(1, hq * n * rows))
    parts = []
    for first in range(0, b, sequences):
        s = slice(first, first + sequences)
        some = keys[s] if valid is None else keys[s].masked_fill(~valid[s, ..., None], 0.0)  # they may hold NaN
        sums: list[torch.Tensor] = []
        for start in range(0, max(w, 1), rows):  # without queries the sums are zeros
            r = slice(start, start + rows)
            logits = _logits(queries[s, :, r], some, scaling, softcap)
            paid = _probabilities(logits, _bias(times[s], query_positions[s, r]), order, at_once)[..., :entries]
            if blind is not None:
                gap = blind[s, :, r, None]
                paid = paid.masked_fill(gap if paid.dim() == 4 else gap[:, :, None], 0.0)
            sums.append(_newest(paid, w - start, newest) if newest else paid)
        parts.append(_add(sums) if newest else _join(sums, reduce_q))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    out = _reduce(out, reduce_g, dim=2) if queries_first and reduce_g else out
    return out / w if reduce_q == "mean" else out


def _by_kernel(
    queries: torch.Tensor,
    keys: torch.Tensor,
    times: torch.Tensor,
    query_positions: torch.Tensor,
    scaling: float,
    softcap: float | None,
    order: Order,
    reduce_g: Reduce | None,
    reduce_q: Reduce | None,
    newest: Sequence[int],
) -> torch.Tensor:
    """Return what `window_attention` returns, with sums in place of means over queries. times: as for `_bias`."""
    if order == "group_then_softmax" and reduce_g is None:
        raise ValueError(LOGITS_NEED_A_REDUCTION)
    (b, hk, n, _), (w, g) = keys.shape, (queries.shape[2], queries.shape[1] // keys.shape[1])
    kept = [] if reduce_g else [g]
    kept += [len(newest)] if newest else [] if reduce_q else [w]
    out = queries.new_empty(b, hk, *kept, n, dtype=torch.float32)
    totals = queries.new_empty(b, hk, 1 if order == "group_then_softmax" else g, w, dtype=torch.float32)
    if not queries.is_meta:  # the memory plan counts the tensors only
        from kvbench.eviction.terms.window_attention_kernel import launch

        queries, keys = (x if x.stride(-1) == 1 else x.contiguous() for x in (queries.detach(), keys.detach()))
        with torch.cuda.device(keys.device) if keys.is_cuda else nullcontext():
            launch(
                *(queries, keys, times.contiguous(), query_positions.contiguous(), out, totals),
                scaling=scaling,
                softcap=softcap,
                group_first=order == "group_then_softmax",
                reduce_g=reduce_g,
                reduce_q=reduce_q,
                newest=tuple(newest),
            )
    return out


def reduced_group(sums: torch.Tensor, how: Reduce | None) -> torch.Tensor:
    """Reduce attention that was summed over queries, [b, Hk, g, N], over the g query heads; None keeps the axis. Raises
    ValueError for "max" and "min": a maximum or minimum over heads must be taken before the sum over queries."""
    if how in ("max", "min"):
        raise ValueError(f"attention summed over the queries has no {how} over query heads; give reduce_g mean or sum")
    return sums if how is None else _reduce(sums, how, dim=2)


def _blind(times: torch.Tensor, query_positions: torch.Tensor) -> torch.Tensor | None:
    """Return the mask of queries that see no key, [b, Hk, w] bool; on a CPU, None if every query sees a key.

    times: [b, Hk, N], as for `_bias`. The caller sets the probabilities of these queries to 0. On a GPU the mask is
    always returned, because a check of its values would make the host wait.
    """
    blind = times.amin(dim=-1)[:, :, None] > query_positions[:, None]
    return blind if on_gpu(blind) or bool(blind.any()) else None


def _bias(times: torch.Tensor, query_positions: torch.Tensor) -> torch.Tensor:
    """Return [b, Hk, r, N]: 0 where a query sees a key, otherwise at most -1e30.

    times: [b, Hk, N], the positions of the keys, infinite for hidden keys; query_positions: [b, r]. Adding the result
    to logits hides keys, in a fifth of the time that a selection by mask takes.
    """
    return (query_positions[:, None, :, None] - times[:, :, None]).clamp_(max=0.0).mul_(HIDDEN)


def _logits(queries: torch.Tensor, keys: torch.Tensor, scaling: float, softcap: float | None) -> torch.Tensor:
    """Return the logits of queries [b, Hq, r, d] and keys [b, Hk, N, d] as [b, Hk, g, r, N]. The queries of a group are
    stacked, so each KV head needs one matrix product."""
    b, hq, r, d = queries.shape
    hk, n = keys.shape[1:3]
    stacked = queries.reshape(b, hk, hq // hk * r, d).float() * scaling
    logits = (stacked @ keys.float().transpose(-1, -2)).view(b, hk, hq // hk, r, n)
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _join(blocks: list[torch.Tensor], how: Reduce | None) -> torch.Tensor:
    """Merge the results of blocks of r queries, [..., r, N]: reduce over all queries, or concatenate if `how` is None.
    For a mean this returns the sum over the queries; the caller divides it."""
    if how is None:
        return torch.cat(blocks, dim=-2)
    how = "sum" if how == "mean" else how
    reduced = [_reduce(block, how, dim=-2) for block in blocks]
    return _add(reduced) if how == "sum" else _reduce(torch.stack(reduced), how, dim=0)


def _add(blocks: list[torch.Tensor]) -> torch.Tensor:
    return blocks[0] if len(blocks) == 1 else torch.stack(blocks).sum(dim=0)


def _newest(paid: torch.Tensor, age: int, counts: Sequence[int]) -> torch.Tensor:
    """Return [..., len(counts), N]: for each n in counts, the sum of `paid` over those queries of the block that are
    among the newest n of all queries.

    paid: [..., r, N], the attention of a block of r queries, oldest first. age: number of queries from the block's
    first to the newest of all, both included.
    """
    return torch.stack([paid[..., max(0, age - n) :, :].sum(dim=-2) for n in counts], dim=-2)


def _probabilities(logits: torch.Tensor, bias: torch.Tensor, order: Order, how: Reduce | None) -> torch.Tensor:
    """Turn logits [b, Hk, g, r, N] into probabilities, reduced over the group to [b, Hk, r, N] unless `how` is None.

    bias: [b, Hk, r, N], as from `_bias`. The probabilities of a query that sees no key are arbitrary. Raises ValueError
    for the order "group_then_softmax" if `how` is None.
    """
    if order == "group_then_softmax":
        if how is None:
            raise ValueError(LOGITS_NEED_A_REDUCTION)
        return _reduce(logits, how, dim=2).add_(bias).softmax(dim=-1)
    probabilities = logits.add_(bias[:, :, None]).softmax(dim=-1)
    return probabilities if how is None else _reduce(probabilities, how, dim=2)


def _reduce(x: torch.Tensor, how: Reduce, dim: int) -> torch.Tensor:
    if how in ("max", "min"):
        return x.amax(dim=dim) if how == "max" else x.amin(dim=dim)
    return x.mean(dim=dim) if how == "mean" else x.sum(dim=dim)
