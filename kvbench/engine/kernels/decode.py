"""The Triton kernel of a decode step's attention: one new token per slot, any number of entries per slot and KV head.

There are S * Hk * blocks * splits GPU programs. The query heads of a KV head are divided into blocks of at most
MOST_QUERIES heads, and each block forms one matrix; latent attention needs several blocks, because all query heads
share one KV head. The older entries of a head are divided into splits. A program computes one block over one split, in
tiles with an online softmax in float32. The programs of the first split also attend to the new entry, from registers.
One of them, that of the first block, also writes the new entry to the cache. `_combine` adds the partial sums of the
splits. In latent attention the value is a part of the key, so K stands for V too. If attention is to be summed per
entry, `_attend` stores the logits, and `_receive` turns them into attention and adds that to the sums.

The number of splits depends only on sizes that are fixed for the life of an engine. Which entries a split reads depends
only on the number of entries that its head holds. So the bits of a slot's result never depend on the other slots or on
the slot's index. All that changes from step to step is read from the device, so a CUDA graph can capture a call.

Letters: S slots, Hq query heads, Hk KV heads, G query heads per KV head, P cache rows (places for an entry) per head, D
and Dv head dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvbench.engine.cache.paged import PAGE

LOWEST = tl.constexpr(-1e30)  # initial maximum of the logits; finite, so that the difference of two maxima is not NaN
TILE = 32  # most cache rows per tile; wide heads get fewer
TILE_BYTES = 32 << 10  # most bytes of K and V per tile, so that two programs with two stages each fit a multiprocessor
STAGES = 3
MOST_QUERIES = 32  # query heads per program; with wide heads, more would not fit into registers
WIDE = 256  # with larger head dimensions, a program takes half as many query heads and one pipeline stage less
RECEIVERS = 1024  # entries to which one program of `_receive` adds attention
WARPS = 4  # half as many where the sums of a program fit into the registers of fewer threads: at most NARROW numbers
NARROW = 16 * 128
DOTS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


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
    slots, query_heads, dim = query.shape
    if latent:
        value, values = key, keys
    heads, value_dim = value.shape[1], latent or value.shape[2]
    group = query_heads // heads
    together = min(group, MOST_QUERIES if dim <= WIDE else MOST_QUERIES // 2)  # query heads of a program
    blocks = -(-group // together)
    if not (
        keys.is_contiguous() and values.is_contiguous() and query.stride(2) == key.stride(2) == value.stride(2) == 1
    ):
        raise ValueError("keys and values, and the last dimension of query, key and value, must be contiguous")
    lengths = lengths.expand(slots, heads)
    width = 0 if table is None else table.shape[2]
    rows = width * PAGE if width else keys.shape[2]
    out = query.new_empty(slots, query_heads, value_dim)
    partial = totals = logits = out  # any tensor, as with `some_table` and `some_sinks`: it is not accessed
    if splits > 1:
        partial = query.new_empty(slots, query_heads, splits, value_dim, dtype=torch.float32)
    if splits > 1 or sums is not None:
        totals = query.new_empty(slots, query_heads, splits, 2, dtype=torch.float32)
    if sums is not None:
        logits = query.new_empty(slots, query_heads, rows, dtype=torch.float32)
    some_table, some_sinks = lengths if table is None else table, out if sinks is None else sinks
    tensors = (query, key, value, keys, values, lengths, live, some_table, some_sinks, out, partial, totals, logits)
    strides = [step for tensor in (query, key, value, lengths) for step in tensor.stride()[:2]]
    strides.append(live.stride(0))
    sizes: dict[str, Any] = dict(
        HK=heads,
        G=group,
        SPLITS=splits,
        TILE=_tile(dim, value_dim, query.element_size()),
    )
    common: dict[str, Any] = sizes | dict(
        DV=value_dim,
        DVP=_padded(value_dim),
        SINK=sinks is not None,
        num_warps=WARPS // 2 if _padded(together) * _padded(value_dim) <= NARROW else WARPS,
    )
    _attend[(slots * heads * blocks, splits)](
        *tensors,
        *strides,
        *(rows, width, scaling, softcap or 0.0),
        GB=together,
        BLOCKS=blocks,
        GP=_padded(together),
        VD=values.shape[-1],
        SHARED=latent > 0,
        D=dim,
        DP=_padded(dim),
        PAGED=PAGE if width else 0,
        CAP=softcap is not None,
        LOGIT=sums is not None,
        DOT=tl.float32 if triton.knobs.runtime.interpret else DOTS[query.dtype],  # the interpreter lacks bfloat16
        num_stages=STAGES if dim <= WIDE else STAGES - 1,
        **common,
    )
    near = min(32, triton.next_power_of_2(splits))
    if splits > 1:
        _combine[(slots * query_heads,)](
            *(partial, totals, lengths, live, some_sinks, out, *lengths.stride(), live.stride(0), rows),
            NEAR=near,
            **common,
        )
    if sums is not None:
        _receive[(slots * query_heads, triton.cdiv(rows, RECEIVERS))](
            *(logits, totals, lengths, live, sums, *lengths.stride(), live.stride(0), rows),
            NEAR=near,
            BLOCK=RECEIVERS,
            **sizes,
        )
    return out


def _padded(size: int) -> int:
    """Return the smallest power of two that is at least `size` and at least 16, as Triton's matrix products need."""
    return max(16, triton.next_power_of_2(size))


def _tile(dim: int, value_dim: int, element: int) -> int:
    """Return how many cache rows a program reads at a time: a power of two, at least 16."""
    row = (_padded(dim) + _padded(value_dim)) * element
    return max(16, min(TILE, 1 << (TILE_BYTES // row).bit_length() - 1))


@triton.jit
def _extent(LENGTHS, LIVE, at_length, at_live, rows, SPLITS: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return whether a slot is live, and three numbers of entries for one of its heads.

    The numbers: entries written before this step; those of them that the cache still holds, 0 if the slot is not live;
    and the most entries that one split reads.
    """
    live = tl.load(LIVE + at_live) != 0
    seen = tl.load(LENGTHS + at_length).to(tl.int32)
    held = tl.where(live, tl.minimum(seen, rows), 0)
    return live, seen, held, tl.maximum(tl.cdiv(tl.cdiv(held, SPLITS), TILE), 1) * TILE


@triton.jit
def _row(TABLE, head, n, rows, width, PAGED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the indices, in the tensor of keys or values, of the cache rows `n` of a head."""
    head = head.to(tl.int64)
    if PAGED == 0:
        return head * rows + n
    return tl.load(TABLE + head * width + n // PAGED).to(tl.int64) * PAGED + n % PAGED


@triton.jit
def _logits(products, scaling, softcap, CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    s = products * scaling
    if CAP:
        t = tl.exp(-2.0 * tl.abs(s / softcap))  # softcap * tanh(s / softcap)
        s = tl.where(s < 0, -softcap, softcap) * (1.0 - t) / (1.0 + t)
    return s


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    Q, KEY, VALUE, K, V, LENGTHS, LIVE, TABLE, SINKS, OUT, PARTIAL, TOTALS, LOGITS,
    q_slot, q_head, k_slot, k_head, v_slot, v_head, l_slot, l_head, live_slot, rows, width, scaling, softcap,
    HK: tl.constexpr, G: tl.constexpr, GB: tl.constexpr, BLOCKS: tl.constexpr, GP: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, VD: tl.constexpr, SHARED: tl.constexpr,
    SPLITS: tl.constexpr, TILE: tl.constexpr, PAGED: tl.constexpr, CAP: tl.constexpr, SINK: tl.constexpr,
    LOGIT: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    head, block, split = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS, tl.program_id(1)
    slot, h = head // HK, head % HK
    live, seen, held, span = _extent(LENGTHS, LIVE, slot * l_slot + h * l_head, slot * live_slot, rows, SPLITS, TILE)
    first = split * span
    if (split > 0) & (first >= held):
        return
    g, d, e = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, DVP)
    in_d, in_e = d < D, e < DV
    in_g = (g < GB) & (block * GB + g < G)
    query_head = h * G + block * GB + g
    if LOGIT:
        logits = LOGITS + (slot.to(tl.int64) * (HK * G) + query_head) * rows
    q = tl.load(
        Q + slot * q_slot + query_head[:, None] * q_head + d[None, :],
        mask=in_g[:, None] & in_d[None, :],
        other=0.0,
    )
    m = tl.full([GP], LOWEST, tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, DVP], tl.float32)
    fresh = seen % rows
    if split == 0:
        key = tl.load(KEY + slot * k_slot + h * k_head + d, mask=in_d, other=0.0)
        value = tl.load(VALUE + slot * v_slot + h * v_head + e, mask=in_e, other=0.0)
        at = _row(TABLE, head, tl.where(live, fresh, 0), rows, width, PAGED)
        writes = live & (block == 0)
        tl.store(K + at * D + d, key, mask=d < tl.where(writes, D, 0))
        if not SHARED:
            tl.store(V + at * VD + e, value, mask=e < tl.where(writes, DV, 0))
        m = _logits(tl.sum(q.to(tl.float32) * key.to(tl.float32)[None, :], 1), scaling, softcap, CAP)
        if LOGIT:
            tl.store(logits + fresh, m, mask=in_g & (g < tl.where(live, GP, 0)))
        total += 1.0
        acc += value.to(tl.float32)[None, :]
    q = q.to(DOT)
    for start in range(first, tl.minimum(first + span, held), TILE):
        n = start + tl.arange(0, TILE)
        seen_here = (n < held) & (n != fresh)  # not the row that this step overwrites in a full ring
        at = _row(TABLE, head, tl.minimum(n, held - 1), rows, width, PAGED)[:, None]
        k = tl.load(K + at * D + d[None, :], mask=seen_here[:, None] & in_d[None, :], other=0.0).to(DOT)
        s = _logits(tl.dot(q, tl.trans(k), input_precision="ieee"), scaling, softcap, CAP)
        s = tl.where(seen_here[None, :], s, float("-inf"))
        if LOGIT:
            tl.store(logits[:, None] + n[None, :], s, mask=in_g[:, None] & seen_here[None, :])
        top = tl.maximum(m, tl.max(s, 1))
        p = tl.exp(s - top[:, None])
        shrink = tl.exp(m - top)
        v = tl.load(V + at * VD + e[None, :], mask=seen_here[:, None] & in_e[None, :], other=0.0).to(DOT)
        acc = acc * shrink[:, None] + tl.dot(p.to(DOT), v, input_precision="ieee")
        total = total * shrink + tl.sum(p, 1)
        m = top
    row = slot.to(tl.int64) * (HK * G) + query_head
    at_split = row * SPLITS + split
    if (SPLITS > 1) or LOGIT:
        tl.store(TOTALS + at_split * 2, m, mask=in_g)
        tl.store(TOTALS + at_split * 2 + 1, total, mask=in_g)
    if SPLITS == 1:
        if SINK:
            total += tl.exp(tl.load(SINKS + query_head, mask=in_g, other=0.0).to(tl.float32) - m)
        result = tl.where(live, acc / total[:, None], 0.0)
        tl.store(OUT + row[:, None] * DV + e[None, :], result.to(OUT.dtype.element_ty), in_g[:, None] & in_e[None, :])
    else:
        tl.store(PARTIAL + at_split[:, None] * DV + e[None, :], acc, mask=in_g[:, None] & in_e[None, :])


@triton.jit
def _highest(TOTALS, row, used, SPLITS: tl.constexpr, NEAR: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the largest logit of one query head over its splits. used: number of splits that read entries."""
    top = tl.full([], LOWEST, tl.float32)
    for start in range(0, used, NEAR):
        s = start + tl.arange(0, NEAR)
        top = tl.maximum(top, tl.max(tl.load(TOTALS + (row * SPLITS + s) * 2, mask=s < used, other=LOWEST), 0))
    return top


@triton.jit
def _combine(  # type: ignore[no-untyped-def]
    PARTIAL, TOTALS, LENGTHS, LIVE, SINKS, OUT, l_slot, l_head, live_slot, rows,
    HK: tl.constexpr, G: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, SPLITS: tl.constexpr, NEAR: tl.constexpr,
    TILE: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of one query head's splits, up to 32 splits at a time."""
    row = tl.program_id(0).to(tl.int64)
    slot, query_head = row // (HK * G), row % (HK * G)
    live, _, held, span = _extent(
        LENGTHS, LIVE, slot * l_slot + query_head // G * l_head, slot * live_slot, rows, SPLITS, TILE
    )
    used = tl.maximum(tl.cdiv(held, span), 1)
    e = tl.arange(0, DVP)
    top = _highest(TOTALS, row, used, SPLITS, NEAR)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([DVP], tl.float32)
    for start in range(0, used, NEAR):
        s = start + tl.arange(0, NEAR)
        at = row * SPLITS + s
        weight = tl.exp(tl.load(TOTALS + at * 2, mask=s < used, other=LOWEST) - top)
        total += tl.sum(weight * tl.load(TOTALS + at * 2 + 1, mask=s < used, other=0.0), 0)
        part = tl.load(PARTIAL + at[:, None] * DV + e[None, :], mask=(s < used)[:, None] & (e < DV)[None, :], other=0.0)
        acc += tl.sum(weight[:, None] * part, 0)
    if SINK:
        total += tl.exp(tl.load(SINKS + query_head).to(tl.float32) - top)
    result = tl.where(live, acc / total, 0.0)
    tl.store(OUT + row * DV + e, result.to(OUT.dtype.element_ty), mask=e < DV)


@triton.jit
def _receive(  # type: ignore[no-untyped-def]
    LOGITS, TOTALS, LENGTHS, LIVE, RECEIVED, l_slot, l_head, live_slot, rows,
    HK: tl.constexpr, G: tl.constexpr, SPLITS: tl.constexpr, TILE: tl.constexpr, NEAR: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Add one query head's attention to the sums of a block of entries."""
    row = tl.program_id(0).to(tl.int64)
    slot, query_head = row // (HK * G), row % (HK * G)
    live, seen, held, span = _extent(
        LENGTHS, LIVE, slot * l_slot + query_head // G * l_head, slot * live_slot, rows, SPLITS, TILE
    )
    used = tl.maximum(tl.cdiv(held, span), 1)
    top = _highest(TOTALS, row, used, SPLITS, NEAR)
    total = tl.zeros([], tl.float32)
    for start in range(0, used, NEAR):
        s = start + tl.arange(0, NEAR)
        weight = tl.exp(tl.load(TOTALS + (row * SPLITS + s) * 2, mask=s < used, other=LOWEST) - top)
        total += tl.sum(weight * tl.load(TOTALS + (row * SPLITS + s) * 2 + 1, mask=s < used, other=0.0), 0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    receives = (n < held) | (n == tl.where(live, seen % rows, -1))
    paid = tl.exp(tl.load(LOGITS + row * rows + n, mask=receives, other=LOWEST) - top) / total
    at = RECEIVED + row * rows + n
    tl.store(at, tl.load(at, mask=receives, other=0.0) + paid, mask=receives)
