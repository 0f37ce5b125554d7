"""Compaction on a GPU, by two Triton kernels instead of some forty launches of PyTorch per view.

In each head, `_list` assigns a hole to each kept entry that must move, as `stack.moves` does. `_move` copies these
entries, in up to `TOGETHER` tensors at once. In a head that keeps c entries, the entries that move lie at places
from c on and the holes lie before c, so copies may run in any order. Both kernels serve dense and paged caches.

Letters: b rows of a batch, Hk KV heads, h = b * Hk, n entries per head, D numbers of an entry in one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

LISTED = 1024  # places whose marks `_list` reads at once
TOGETHER = 4  # tensors that one launch of `_move` copies: keys, values, positions and a column
NUMBERS = 4096  # numbers that a program of `_move` copies at once in one tensor
MOST_MOVED = 64  # entries that a program of `_move` copies in each tensor, if the entries are small


def counted(keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many entries each head keeps and how many of these must move, both [b, Hk] int64. keep: [b, Hk, n]
    bool, the entries that stay."""
    kept, _, moved = _listed(keep, 0, 0)[0].view(3, *keep.shape[:2])
    return kept, moved


def compact(
    keep: torch.Tensor,
    places: int,
    tensors: Sequence[torch.Tensor],
    index: torch.Tensor,
    width: int,
    table: torch.Tensor | None = None,
    page: int = 0,
    fewest: int = 0,
) -> torch.Tensor:
    """Move the kept entries of every head to its first places.

    Returns how many entries each head lacks to reach `fewest`, [h] int64; 0 for a head that keeps enough.

    Args:
        keep: [b, Hk, n] bool, the entries that stay. places: an upper bound, at least 1, on the entries that move in a
            head.
        tensors: contiguous, with all rows, not only the batch's. Each holds D numbers or one number per place:
            [rows, Hk, width(, D)] or, with a table, [pages * page(, D)].
        index: [b] int64, the batch's rows among all rows. width: the size of axis 2 of the tensors or of the table.
        table: [rows, Hk, width] int32, contiguous: the pages of every head in order. page: entries per page.
    """
    heads = keep.shape[1]
    facts, lists = _listed(keep, fewest, places)
    axes = 1 if table is not None else 3  # before the numbers of an entry
    sized = [(x, x.shape[axes:].numel()) for x in tensors if x.numel()]
    for first in range(0, len(sized), TOGETHER):
        some = sized[first : first + TOGETHER]
        some += [(some[0][0], 0)] * (TOGETHER - len(some))
        sizes = {f"D{i}": size for i, (_, size) in enumerate(some)}
        padded = max(triton.next_power_of_2(size) for size in sizes.values())
        tile = max(1, min(MOST_MOVED, NUMBERS // padded))
        with _current(keep):
            _move[(keep.shape[0] * heads, triton.cdiv(places, tile))](
                *(lists, facts, index, index if table is None else table, *(x for x, _ in some), places, width),
                **sizes,
                DP=padded,
                HK=heads,
                TILE=tile,
                PAGE=page,
            )
    return facts[1]


def _listed(keep: torch.Tensor, fewest: int, places: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `_list` stores: facts [3, h] int64, and lists [2, h, places] int32 of sources and of targets. The
    facts of a head: the entries that it keeps, how many it lacks to reach `fewest`, and how many must move."""
    heads, n = keep.shape[:2].numel(), keep.shape[2]
    facts = torch.empty(3, heads, dtype=torch.int64, device=keep.device)
    lists = torch.empty(2, heads, places, dtype=torch.int32, device=keep.device)
    with _current(keep):
        _list[(heads,)](keep.contiguous().view(torch.int8), facts, lists, n, places, fewest, TILE=LISTED)
    return facts, lists


def _current(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Make the tensor's device current inside the `with` block: Triton launches kernels on the current device."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@triton.jit(do_not_specialize=["n", "places", "fewest"])
def _list(KEEP, FACTS, LISTS, n, places, fewest, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """For one head: list the places of the entries that move and, in the same order, their targets; store the facts."""
    head, heads = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    kept = tl.zeros([TILE], tl.int32)
    for start in range(0, n, TILE):
        at = start + tl.arange(0, TILE)
        kept += tl.load(KEEP + head * n + at, mask=at < n, other=0).to(tl.int32)
    count = tl.sum(kept, 0)
    sources, targets = LISTS + head * places, LISTS + (heads + head) * places
    moved, holes = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for start in range(0, n, TILE):
        at = start + tl.arange(0, TILE)
        stays = tl.load(KEEP + head * n + at, mask=at < n, other=0) != 0
        moves, hole = (stays & (at >= count)).to(tl.int32), ((stays == 0) & (at < count)).to(tl.int32)
        source, target = moved + tl.cumsum(moves, 0) - 1, holes + tl.cumsum(hole, 0) - 1
        tl.store(sources + source, at, mask=(moves != 0) & (source < places))
        tl.store(targets + target, at, mask=(hole != 0) & (target < places))
        moved += tl.sum(moves, 0)
        holes += tl.sum(hole, 0)
    tl.store(FACTS + head, count.to(tl.int64))
    tl.store(FACTS + heads + head, tl.maximum(fewest - count, 0).to(tl.int64))
    tl.store(FACTS + 2 * heads + head, moved.to(tl.int64))


@triton.jit
def _at(place, row, TABLE, width, PAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the index, int64, at which the tensors hold the entry at `place` of a head. row: the head's index after
    axes [rows, Hk] are flattened."""
    if PAGE:
        return tl.load(TABLE + row * width + place // PAGE).to(tl.int64) * PAGE + place % PAGE
    return row * width + place


@triton.jit
def _copy(X, source, target, here, D: tl.constexpr, DP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy entries of D numbers from the indices `source` to `target` where `here` is true."""
    if D == 1:
        tl.store(X + target, tl.load(X + source, mask=here), mask=here)
    elif D:
        d = tl.arange(0, DP)[None, :]
        inside = here[:, None] & (d < D)
        tl.store(X + target[:, None] * D + d, tl.load(X + source[:, None] * D + d, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["places", "width"])
def _move(  # type: ignore[no-untyped-def]
    LISTS, FACTS, INDEX, TABLE, X0, X1, X2, X3, places, width,
    D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, D3: tl.constexpr,
    DP: tl.constexpr, HK: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Move up to TILE entries of one head in four tensors. A tensor whose D is 0 is left out."""
    head, heads = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    pair = tl.program_id(1) * TILE + tl.arange(0, TILE)
    here = pair < tl.minimum(tl.load(FACTS + 2 * heads + head), places)
    row = tl.load(INDEX + head // HK) * HK + head % HK
    source = tl.load(LISTS + head * places + pair, mask=here, other=0)
    target = tl.load(LISTS + (heads + head) * places + pair, mask=here, other=0)
    source, target = _at(source, row, TABLE, width, PAGE), _at(target, row, TABLE, width, PAGE)
    _copy(X0, source, target, here, D0, DP)
    _copy(X1, source, target, here, D1, DP)
    _copy(X2, source, target, here, D2, DP)
    _copy(X3, source, target, here, D3, DP)
