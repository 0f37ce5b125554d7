"""Draws the next tokens on a GPU without making the host wait: the same ids as `sampler.draw`, except for rounding.

A row is the logits of one slot. `_threshold` finds in each row the smallest logit that the filters allow. For top-k,
and again for top-p, it reads the row in eight passes, each of which finds four bits of this logit; sorting a vocabulary
would cost more. Equal logits are kept or dropped together. `_best` adds the noise of `kvbench.eviction.noise`, with the
same integer arithmetic and in float64, and finds the best token of each part of the vocabulary; PyTorch takes the best
of these. Letters: R rows, V logits per row.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kvbench.records import Sampling

PART = 1024  # tokens per program of `_best`
BLOCK = 1024  # logits that `_threshold` compares at once with 16 candidates for the threshold
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)  # these three constants as in noise.py
MIX_A = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_B = tl.constexpr(0x94D049BB133111EB)


def draw(logits: torch.Tensor, keys: torch.Tensor, steps: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Draw the next token [R] int64 of every row of logits [R, V]; see `sampler.draw`."""
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    rows, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, PART)
    shape = (logits, logits.stride(0), vocabulary, float(sampling.temperature))
    filters = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    smallest = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if filters:
        # min-p allows a scaled logit that is at least the largest one plus this number.
        below = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
        limits = (float(sampling.top_k), float(sampling.top_p), below)
        used = dict(K=0 < sampling.top_k < vocabulary, P=sampling.top_p < 1)
        _threshold[(rows,)](*shape, *limits, smallest, **used, BLOCK=BLOCK, num_warps=16)
    scores = torch.empty(rows, parts, dtype=torch.float64, device=logits.device)
    tokens = torch.empty(rows, parts, dtype=torch.int64, device=logits.device)
    noise = (keys, keys.stride(0), steps, steps.stride(0))
    _best[(rows, parts)](*shape, smallest, *noise, scores, tokens, parts, FILTERS=filters, PART=PART, num_warps=4)
    return tokens.gather(1, scores.argmax(dim=1, keepdim=True)).squeeze(1)


@triton.jit
def _scaled(LOGITS, row, stride, ids, vocabulary, temperature):  # type: ignore[no-untyped-def]
    x = tl.load(LOGITS + row.to(tl.int64) * stride + ids, mask=ids < vocabulary, other=float("-inf"))
    return tl.div_rn(x.to(tl.float32), temperature) + 0.0  # rounded as on a CPU; + 0.0 turns -0.0 into 0.0


@triton.jit
def _ordered(x):  # type: ignore[no-untyped-def]
    """Return unsigned integers that have the same order as the floats `x`."""
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)


@triton.jit
def _smallest(  # type: ignore[no-untyped-def]
    LOGITS, row, stride, vocabulary, temperature, top, least, limit, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the smallest number such that fewer than `limit` logits are larger.

    WEIGHTED: return instead the smallest number such that the larger logits together weigh less than `limit`. A logit z
    weighs exp(z - top) if z is at least `least`, else 0.
    """
    found = tl.full([], 0, tl.uint32)
    candidate = tl.arange(0, 16).to(tl.uint32)
    shift = tl.full([], 28, tl.uint32)
    for _ in range(8):
        last = found + ((candidate + 1) << shift) - 1  # largest number that begins with `found` and these four bits
        above = tl.zeros([BLOCK, 16], tl.float32)
        for start in tl.range(0, vocabulary, BLOCK, num_stages=3):
            z = _scaled(LOGITS, row, stride, start + tl.arange(0, BLOCK), vocabulary, temperature)
            weight = tl.where(z >= least, tl.exp(z - top), 0.0) if WEIGHTED else tl.where(z == z, 1.0, 0.0)
            above += tl.where(_ordered(z)[:, None] > last[None, :], weight[:, None], 0.0)
        too_many = tl.sum((tl.sum(above, 0) >= limit).to(tl.int32), 0)
        found += too_many.to(tl.uint32) << shift
        shift -= 4
    return tl.where(found >= 0x80000000, found ^ 0x80000000, found ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _threshold(  # type: ignore[no-untyped-def]
    LOGITS, stride, vocabulary, temperature, most, share, below, SMALLEST,
    K: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the smallest scaled logit that top-k, then top-p, then min-p allow; the largest logit is always allowed."""
    row = tl.program_id(0)
    tops = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        tops = tl.maximum(tops, _scaled(LOGITS, row, stride, start + tl.arange(0, BLOCK), vocabulary, temperature))
    top = tl.max(tops, 0)
    smallest = tl.full([], float("-inf"), tl.float32)
    if K:
        smallest = _smallest(LOGITS, row, stride, vocabulary, temperature, top, smallest, most, False, BLOCK)
    if P:
        weights = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, vocabulary, BLOCK, num_stages=3):
            z = _scaled(LOGITS, row, stride, start + tl.arange(0, BLOCK), vocabulary, temperature)
            weights += tl.where(z >= smallest, tl.exp(z - top), 0.0)
        limit = tl.sum(weights, 0) * share
        smallest = tl.maximum(
            smallest, _smallest(LOGITS, row, stride, vocabulary, temperature, top, smallest, limit, True, BLOCK)
        )
    tl.store(SMALLEST + row, tl.minimum(tl.maximum(smallest, top + below), top))


@triton.jit
def _hashed(x):  # type: ignore[no-untyped-def]
    """Return the hash of `x` by splitmix64's finaliser, on uint64."""
    x = (x ^ (x >> 30)) * MIX_A
    x = (x ^ (x >> 27)) * MIX_B
    return x ^ (x >> 31)


@triton.jit
def _best(  # type: ignore[no-untyped-def]
    LOGITS, stride, vocabulary, temperature, SMALLEST, KEYS, key_stride, STEPS, step_stride, SCORES, TOKENS, parts,
    FILTERS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Find, in one part of the vocabulary, the allowed token with the largest sum of scaled logit and Gumbel noise. A
    token with a logit of NaN or +inf beats all others."""
    row, part = tl.program_id(0), tl.program_id(1)
    ids = part * PART + tl.arange(0, PART)
    z = _scaled(LOGITS, row, stride, ids, vocabulary, temperature)
    bad = (z != z) | (z == float("inf"))
    allowed = z > float("-inf")
    if FILTERS:
        allowed = allowed & (z >= tl.load(SMALLEST + row))
    score = tl.where(bad, float("inf"), float("-inf")).to(tl.float64)
    if tl.sum(allowed.to(tl.int32), 0) > 0:
        key, step = tl.load(KEYS + row * key_stride), tl.load(STEPS + row * step_stride)
        state = _hashed(key.to(tl.uint64, bitcast=True) + GOLDEN)
        state = _hashed(state + step.to(tl.uint64, bitcast=True) + GOLDEN)
        bits = _hashed(state + ids.to(tl.uint64) + GOLDEN)
        uniform = ((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2 ** -52
        gumbel = -tl.log(-tl.log(uniform))
        score = tl.where(allowed & ~bad, z.to(tl.float64) + gumbel, score)
    best, at = tl.max(score, 0, return_indices=True)
    tl.store(SCORES + row * parts + part, best)
    tl.store(TOKENS + row * parts + part, (part * PART + at).to(tl.int64))
