"""`window_attention` on a GPU, by Triton kernels that store neither logits nor probabilities.

`_normalise` computes the logarithm of each softmax's denominator. Then `_pay` computes the logits again, one tile of
keys per program, turns them into probabilities, and reduces these over the group and the queries. Both kernels take the
queries in blocks: the queries of a block times the query heads of the group are at most ROWS rows of logits. The size
of a block does not depend on the batch or on other heads, and neither do the bits of a head's result.

Products of 16-bit keys and queries are exact in float32, and their sums are float32.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kvbench.lazy import torch

ROWS, TILE, WARPS = 64, 64, 4  # most rows of logits per block of queries, keys per tile, warps
LEAST = 16  # rows that the GPU's matrix units need at least
STAGES = 2


def launch(
    queries: torch.Tensor,
    keys: torch.Tensor,
    times: torch.Tensor,
    query_positions: torch.Tensor,
    out: torch.Tensor,
    totals: torch.Tensor,
    *,
    scaling: float,
    softcap: float | None,
    group_first: bool,
    reduce_g: str | None,
    reduce_q: str | None,
    newest: tuple[int, ...],
) -> None:
    """Start the kernels, which write `out`.

    Args:
        queries: [b, Hk * g, w, d]; keys: [b, Hk, N, d]; d is contiguous, a group has at most ROWS query heads.
        times: [b, Hk, N] float32, the positions of the keys, infinite for hidden keys; query_positions: [b, w].
        out: float32, contiguous, [h, g, len(newest), w, N] with h = b * Hk. A reduced axis g or w has length 1, and so
            has the axis of `newest` if `newest` is empty.
        totals: [h, g, w] float32, [h, 1, w] if `group_first`: receives the logarithms of the softmax's denominators.
        group_first: whether logits, not probabilities, are reduced over the group.
        reduce_g, reduce_q: "mean", "sum", "max" or None; `reduce_q="mean"` writes sums. newest: see `window_attention`.
    """
    b, hk, n, d = keys.shape
    group, w = queries.shape[1] // hk, queries.shape[2]
    heads = triton.next_power_of_2(group)
    most = max(LEAST // heads, ROWS // heads)
    block = min(max(1, LEAST // heads, triton.next_power_of_2(w)), most)  # queries per block
    sizes: dict[str, Any] = dict(HK=hk, G=group, GP=heads, WB=block, D=d, DP=max(16, triton.next_power_of_2(d)))
    sizes |= dict(TILE=TILE, CAP=softcap is not None, HOW_G=reduce_g or "none", FIRST=group_first)
    sizes["DOT"] = tl.float32 if triton.knobs.runtime.interpret else None  # the interpreter lacks bfloat16
    strides = *queries.stride()[:3], *keys.stride()[:3]
    shared = queries, keys, times, query_positions, totals
    numbers = *strides, n, w, scaling, 0.0 if softcap is None else softcap
    how = dict(num_warps=WARPS, num_stages=STAGES)
    _normalise[(b * hk * triton.cdiv(w, block),)](*shared, *numbers, **sizes, **how)
    for i, count in enumerate(newest or (w,)):
        _pay[(b * hk * triton.cdiv(n, TILE),)](
            *(*shared, out, *numbers, max(0, w - count), i),
            **sizes,
            NEWEST=max(1, len(newest)),
            HOW_Q=reduce_q or "none",
            **how,
        )


@triton.jit
def _queries(  # type: ignore[no-untyped-def]
    Q, POSITIONS, head, first, q_batch, q_head, q_row, W,
    HK: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, WB: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Return WB queries of each head of a group as rows [GP * WB, DP], and their positions [WB], -1 past the end."""
    row, d = tl.arange(0, GP * WB), tl.arange(0, DP)
    g, w = row // WB, first + row % WB
    at = head // HK * q_batch + (head % HK * G + g).to(tl.int64) * q_head + w * q_row
    here = (g < G) & (w < W)
    query = tl.load(Q + at[:, None] + d[None, :], mask=here[:, None] & (d < D)[None, :], other=0.0)
    w = first + tl.arange(0, WB)
    position = tl.load(POSITIONS + head // HK * W + w, mask=w < W, other=-1).to(tl.float32)
    return query if DOT is None else query.to(DOT), position


@triton.jit
def _keys(  # type: ignore[no-untyped-def]
    K, TIMES, head, at, n, k_batch, k_head, k_row, HK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Return the keys [TILE, DP] of the entries `at`, and their times; zeros for hidden keys, which may hold NaN."""
    d = tl.arange(0, DP)
    time = tl.load(TIMES + head * n + at, mask=at < n, other=float("inf"))
    start = K + head // HK * k_batch + head % HK * k_head
    seen = (time < float("inf"))[:, None] & (d < D)[None, :]
    key = tl.load(start + at.to(tl.int64)[:, None] * k_row + d[None, :], mask=seen, other=0.0)
    return key if DOT is None else key.to(DOT), time


@triton.jit
def _logits(  # type: ignore[no-untyped-def]
    query, position, key, time, scaling, softcap, G: tl.constexpr, GP: tl.constexpr, WB: tl.constexpr,
    TILE: tl.constexpr, CAP: tl.constexpr, HOW_G: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Return logits [GP, WB, TILE], or [1, WB, TILE] if they are reduced over the group; -inf for unseen keys."""
    logits = tl.dot(query, tl.trans(key), input_precision="ieee") * scaling
    if CAP:
        t = tl.exp(-2.0 * tl.abs(logits / softcap))  # softcap * tanh(logits / softcap)
        logits = tl.where(logits < 0, -softcap, softcap) * (1.0 - t) / (1.0 + t)
    logits = tl.reshape(logits, (GP, WB, TILE))
    if FIRST:
        logits = _over_group(logits, float("-inf"), G, GP, HOW_G)[None, :, :]
    return tl.where(time[None, None, :] <= position[None, :, None], logits, float("-inf"))


@triton.jit
def _over_group(x, lowest, G: tl.constexpr, GP: tl.constexpr, HOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reduce x [GP, ...] over its first G elements. lowest: a lower bound of all elements."""
    here = (tl.arange(0, GP) < G)[:, None, None]
    if HOW == "max":
        return tl.max(tl.where(here, x, lowest), 0) + 0.0 * tl.sum(tl.where(here, x, 0.0), 0)  # NaN stays NaN
    total = tl.sum(tl.where(here, x, 0.0), 0)
    return total / G if HOW == "mean" else total


@triton.jit(do_not_specialize=["W"])
def _normalise(  # type: ignore[no-untyped-def]
    Q, K, TIMES, POSITIONS, TOTALS, q_batch, q_head, q_row, k_batch, k_head, k_row, n, W, scaling, softcap,
    HK: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, WB: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, TILE: tl.constexpr, CAP: tl.constexpr, HOW_G: tl.constexpr, FIRST: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Store the logarithms of the softmax's denominators for a block of queries; inf for a query that sees no key."""
    blocks = tl.cdiv(W, WB)
    head, first = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * WB
    query, position = _queries(Q, POSITIONS, head, first, q_batch, q_head, q_row, W, HK, G, GP, WB, D, DP, DOT)
    GROUP: tl.constexpr = 1 if FIRST else GP
    top = tl.full([GROUP, WB], float("-inf"), tl.float32)
    total = tl.zeros([GROUP, WB], tl.float32)
    for start in range(0, n, TILE):
        at = start + tl.arange(0, TILE)
        key, time = _keys(K, TIMES, head, at, n, k_batch, k_head, k_row, HK, D, DP, DOT)
        logits = _logits(query, position, key, time, scaling, softcap, G, GP, WB, TILE, CAP, HOW_G, FIRST)
        before, top = top, tl.maximum(top, tl.max(logits, 2))
        safe = tl.where(top == float("-inf"), 0.0, top)  # the difference of two infinities is NaN
        total = total * tl.exp(before - safe) + tl.sum(tl.exp(logits - safe[:, :, None]), 2)
    blind = total == 0
    result = tl.where(blind, float("inf"), top + tl.log(tl.where(blind, 1.0, total)))
    g, w = tl.arange(0, GROUP), first + tl.arange(0, WB)
    KEPT: tl.constexpr = 1 if FIRST else G
    at = (head * KEPT + g)[:, None] * W + w[None, :]
    tl.store(TOTALS + at, result, mask=(g < KEPT)[:, None] & (w < W)[None, :])


@triton.jit(do_not_specialize=["W", "oldest", "place"])
def _pay(  # type: ignore[no-untyped-def]
    Q, K, TIMES, POSITIONS, TOTALS, OUT, q_batch, q_head, q_row, k_batch, k_head, k_row, n, W, scaling, softcap,
    oldest, place,
    HK: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, WB: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, TILE: tl.constexpr, CAP: tl.constexpr, HOW_G: tl.constexpr, FIRST: tl.constexpr,
    DOT: tl.constexpr, NEWEST: tl.constexpr, HOW_Q: tl.constexpr,
):  # fmt: skip
    """Store the attention to a tile of keys, reduced over the group and over the queries from the query `oldest` on."""
    tiles = tl.cdiv(n, TILE)
    head, at = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    key, time = _keys(K, TIMES, head, at, n, k_batch, k_head, k_row, HK, D, DP, DOT)
    KEPT: tl.constexpr = 1 if FIRST else G  # rows of `TOTALS` per query
    GROUP: tl.constexpr = 1 if FIRST else GP
    OUT_G: tl.constexpr = G if HOW_G == "none" else 1
    WIDE: tl.constexpr = GP if HOW_G == "none" else 1
    g = tl.arange(0, GROUP)
    received = tl.zeros([WIDE, TILE], tl.float32)
    for first in range(oldest, W, WB):
        query, position = _queries(Q, POSITIONS, head, first, q_batch, q_head, q_row, W, HK, G, GP, WB, D, DP, DOT)
        logits = _logits(query, position, key, time, scaling, softcap, G, GP, WB, TILE, CAP, HOW_G, FIRST)
        w = first + tl.arange(0, WB)
        total = tl.load(
            TOTALS + (head * KEPT + g)[:, None] * W + w[None, :],
            mask=(g < KEPT)[:, None] & (w < W)[None, :],
            other=float("inf"),
        )
        paid = tl.exp(logits - total[:, :, None])  # [GROUP, WB, TILE]
        if HOW_G != "none" and not FIRST:
            paid = _over_group(paid, 0.0, G, GP, HOW_G)[None, :, :]
        if HOW_Q == "none":
            kept = tl.arange(0, WIDE)
            row = ((head * OUT_G + kept)[:, None] * W + w[None, :])[:, :, None] * n + at[None, None, :]
            here = (kept < OUT_G)[:, None, None] & (w < W)[None, :, None] & (at < n)[None, None, :]
            tl.store(OUT + row, paid, mask=here)
        elif HOW_Q == "max":
            received = tl.maximum(received, tl.max(paid, 1)) + 0.0 * tl.sum(paid, 1)  # NaN stays NaN
        else:
            received += tl.sum(paid, 1)
    if HOW_Q != "none":
        kept = tl.arange(0, WIDE)
        row = ((head * OUT_G + kept) * NEWEST + place)[:, None] * n + at[None, :]
        tl.store(OUT + row, received, mask=(kept < OUT_G)[:, None] & (at < n)[None, :])
