"""The sums of `redundancy` on a GPU, by Triton kernels that never store the matrix of cosines.

In each row of the matrix one cosine does not count: that with the spared key, the similar key of the highest place or,
without a similar key, the row's default (`redundancy._column_sums`). The kernels compute two things. The first are the
sums of all cosines of each row, without the diagonal: the product of the row's normalised key with the sum of all
normalised keys, minus the key's product with itself. The second are the spared cosines, which the caller then
subtracts. To find the spared keys, a Triton program computes the cosines of some rows in tiles, and keeps for each row
only the highest place of a similar key.

To find similar keys, the kernels multiply the keys as they are stored: products of 16-bit keys are exact in float32.
Unit vectors would be rounded, and rounding would move cosines across the threshold.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvbench.lazy import torch

ROWS, TILE, WARPS = 128, 64, 4  # rows of the matrix that a program computes, keys that it reads at once, warps
WIDE_ROWS, WIDE_TILE, WIDE_WARPS = 64, 32, 8  # the same for keys of more than WIDE bytes
WIDE = 256
STAGES = 3


def launch(
    keys: torch.Tensor,
    valid: torch.Tensor | None,
    place: torch.Tensor,
    by_place: torch.Tensor,
    default: torch.Tensor,
    threshold: float,
    inverse: torch.Tensor,
    total: torch.Tensor,
    whole: torch.Tensor,
    spared: torch.Tensor,
    cosine: torch.Tensor,
    one: int,
) -> None:
    """Start the kernels, which write to the tensors from `inverse` to `cosine`.

    Args:
        keys: [b, Hk, N, d] as stored, d contiguous, at most `redundancy.LARGEST` bytes per key; h = b * Hk.
        valid: [b, Hk, N] bool; None: all entries are valid.
        place, by_place, default, threshold: see `redundancy._column_sums`.
        inverse: [h, N] float32, 1 / norm of every key. total: [h, d] float32, the sum of the normalised keys.
        whole: [h, N] float32, the sum of every row of the matrix of cosines, diagonal 0.
        spared: [h, N] int64, the entry that each row spares. cosine: [h, N] int64, the row's cosine with this entry,
            times `one`.
    """
    b, hk, n, d = keys.shape
    rows, tile, warps = (ROWS, TILE, WARPS) if d * keys.element_size() <= WIDE else (WIDE_ROWS, WIDE_TILE, WIDE_WARPS)
    shown = inverse if valid is None else valid.contiguous().view(torch.int8)
    shape, wide = (*keys.stride()[:3], n), dict(HK=hk, D=d, DP=max(16, triton.next_power_of_2(d)), TILE=tile)
    _norms[(b * hk,)](keys, shown, inverse, total, *shape, **wide, MASKED=valid is not None)
    _spare[(b * hk * triton.cdiv(n, rows),)](
        *(keys, inverse, total, place, by_place, default.contiguous(), whole, spared, cosine, *shape, threshold),
        **wide,
        ROWS=rows,
        ONE=one,
        DOT=tl.float32 if triton.knobs.runtime.interpret else None,  # the interpreter lacks bfloat16
        num_warps=warps,
        num_stages=STAGES,
    )


@triton.jit
def _norms(  # type: ignore[no-untyped-def]
    K, VALID, INVERSE, TOTAL, k_batch, k_head, k_row, n,
    HK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Store 1 / norm of every key of a head, 0 for an invalid one, and the sum of the normalised keys."""
    head = tl.program_id(0).to(tl.int64)
    first = K + head // HK * k_batch + head % HK * k_head
    d = tl.arange(0, DP)
    total = tl.zeros([DP], tl.float32)
    for start in range(0, n, TILE):
        at = start + tl.arange(0, TILE)
        here = at < n
        if MASKED:
            here = here & (tl.load(VALID + head * n + at, mask=here, other=0) != 0)
        key = tl.load(first + at[:, None] * k_row + d[None, :], mask=here[:, None] & (d < D)[None, :], other=0.0)
        key = key.to(tl.float32)
        inverse = tl.where(here, 1.0 / (tl.sqrt(tl.sum(key * key, 1)) + 1e-8), 0.0)
        tl.store(INVERSE + head * n + at, inverse, mask=at < n)
        total += tl.sum(key * inverse[:, None], 0)
    tl.store(TOTAL + head * D + d, total, mask=d < D)


@triton.jit
def _keys(first, at, k_row, inverse, n, D: tl.constexpr, DP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the keys of the entries `at`; zeros for invalid ones, which may hold NaN."""
    d = tl.arange(0, DP)
    here = (at < n) & (inverse > 0)
    return tl.load(first + at[:, None] * k_row + d[None, :], mask=here[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _spare(  # type: ignore[no-untyped-def]
    K, INVERSE, TOTAL, PLACE, BY_PLACE, DEFAULT, WHOLE, SPARED, COSINE, k_batch, k_head, k_row, n, threshold,
    HK: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, DOT: tl.constexpr,
    ONE: tl.constexpr,
):  # fmt: skip
    """For some rows of the matrix of a head: store the sum of the row, the entry that the row spares, and the row's
    cosine with this entry."""
    blocks = tl.cdiv(n, ROWS)
    head, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    first = K + head // HK * k_batch + head % HK * k_head
    row = block * ROWS + tl.arange(0, ROWS)
    here = row < n
    inverse = tl.load(INVERSE + head * n + row, mask=here, other=0.0)
    key = _keys(first, row, k_row, inverse, n, D, DP)
    factor = key if DOT is None else key.to(DOT)
    last = tl.zeros([ROWS], tl.float32)
    for start in range(0, n, TILE):
        at = start + tl.arange(0, TILE)
        scale = tl.load(INVERSE + head * n + at, mask=at < n, other=0.0)
        other = _keys(first, at, k_row, scale, n, D, DP)
        product = tl.dot(factor, tl.trans(other if DOT is None else other.to(DOT)), input_precision="ieee")
        similar = (product * inverse[:, None] * scale[None, :] > threshold) & (row[:, None] != at[None, :])
        place = tl.load(PLACE + head * n + at, mask=at < n, other=0.0)
        last = tl.maximum(last, tl.max(tl.where(similar, place[None, :], 0.0), 1))
    spared = tl.load(BY_PLACE + head * (n + 1) + last.to(tl.int32), mask=here, other=0)
    spared = tl.where(last > 0, spared, tl.load(DEFAULT + head * n + row, mask=here, other=0))
    scale = tl.load(INVERSE + head * n + spared, mask=here, other=0.0)
    key, other = key.to(tl.float32), _keys(first, spared, k_row, scale, n, D, DP).to(tl.float32)
    cosine = tl.where(spared == row, 0.0, tl.sum(key * other, 1) * inverse * scale)  # the diagonal is 0
    d = tl.arange(0, DP)
    total = tl.load(TOTAL + head * D + d, mask=d < D, other=0.0)
    whole = inverse * tl.sum(key * total[None, :], 1) - tl.sum(key * key, 1) * inverse * inverse
    tl.store(WHOLE + head * n + row, whole, mask=here)
    tl.store(SPARED + head * n + row, spared.to(tl.int64), mask=here)
    tl.store(COSINE + head * n + row, (cosine.to(tl.float64) * ONE).to(tl.int64), mask=here)
