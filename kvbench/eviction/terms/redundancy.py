"""How much each cached key repeats others: the redundancy of R-KV (arXiv 2505.24133), which G-KV uses too.

Compute the matrix of cosine similarities of all keys of a head, with diagonal 0. In each row, find the most recent
similar key (cosine above the threshold), and replace its cosine by 0. This "spares" that key, so that the newest of
several copies survives. Then take the mean over the rows, and a softmax over the entries: one number per entry.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Literal

from kvbench.eviction.planned_device import enough, on_gpu
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch

# Cosines in memory at a time: 256 MiB; on a CPU, as many as the CPU's cache holds.
SCRATCH_FLOATS = 1 << 26
CPU_SCRATCH_FLOATS = 1 << 19
LARGEST = 512  # bytes of a key in the Triton kernel: the tiles of larger keys do not fit into shared memory
ONE = 1 << 40  # the integer that stands for 1: integers have the same sum in any order, floats have not


def redundancy(
    view: LayerView,
    threshold: float,
    order: torch.Tensor,
    *,
    spare: Literal["last", "first"] = "last",
    column_zero: bool = False,
) -> torch.Tensor:
    """Return the redundancy of every entry, [b, Hk, N] float32, which sums to 1 over the valid entries of a head.

    Args:
        threshold: cosine above which two keys count as similar, 0 or more.
        order: [b, Hk, N] indices that list the entries, as `LayerView.text_order` does.
        spare: which of its similar keys each row of the matrix of cosines spares: the last or the first in `order`.
        column_zero: reproduce the released R-KV code: a row of the matrix without a similar key spares the first entry
            in `order`. If `spare` is "first", every row spares this entry.
    """
    b, hk, n, _ = view.keys.shape
    heads = b * hk
    order = order.reshape(heads, n)
    own = torch.arange(n, device=order.device).expand(heads, n)
    # Each key has a place 1..n. A row spares, of its similar keys, the one of the highest place; 0: no similar key.
    places = torch.arange(1, n + 1, dtype=torch.float32, device=order.device)
    if spare == "first":
        places = torch.zeros_like(places) if column_zero else places.flip(0)
    place = torch.empty(heads, n, device=order.device).scatter_(-1, order, places.expand_as(order))
    by_place = torch.cat([order[:, :1], order if spare == "last" else order.flip(-1)], dim=-1)
    # A row without a similar key spares its diagonal, which is 0 already.
    default = order[:, :1].expand_as(order) if column_zero else own
    if view.kernels and view.keys.shape[-1] * view.keys.element_size() <= LARGEST:
        sums = _column_sums_by_kernel(view, place, by_place, default, threshold)
    else:
        sums = _column_sums(_normalised(view), place, by_place, default, threshold)
    mean = sums.view(b, hk, n) / view.valid.sum(-1, keepdim=True)
    return mean.masked_fill(~view.valid, float("-inf")).softmax(dim=-1)


def _normalised(view: LayerView) -> torch.Tensor:
    """Return the normalised keys [b * Hk, N, d] float32. Invalid entries become zero vectors: they are similar to no
    key and have no effect on sums."""
    keys = view.keys.detach().float()
    unit = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
    if view.mask is not None:
        unit = unit.masked_fill_(~view.mask[..., None], 0.0)
    return unit.flatten(0, 1)


def _column_sums(
    unit: torch.Tensor, place: torch.Tensor, by_place: torch.Tensor, default: torch.Tensor, threshold: float
) -> torch.Tensor:
    """Return the column sums [h, N] of the matrix of cosines, after one cosine per row was set to 0 (spared).

    unit: [h, N, d] normalised keys. place: [h, N], a number from 0 to N for each key; of the keys that are similar to
    the key of a row, the row spares the one with the highest place. Keys at place 0 are left out of this choice.
    by_place: [h, N + 1], the entry at each place from 1 to N; its first element has no effect. default: [h, N], the
    entry that a row spares if no key at a place above 0 is similar.
    """
    h, n, _ = unit.shape
    scratch = SCRATCH_FLOATS if on_gpu(unit) else CPU_SCRATCH_FLOATS
    rows = max(1, min(n, scratch // n))  # independent of h, so that sums do not depend on the batch
    heads = max(1, min(h, scratch // (n * rows)))
    # Two buffers for all blocks: on a CPU, fresh pages would cost more than the arithmetic.
    similarity, similar = unit.new_empty(heads, rows, n), unit.new_empty(heads, rows, n)
    total = unit.new_zeros(h, n)
    for first in enough(range(0, h, heads), unit):
        block = slice(first, first + heads)
        keys = unit[block]
        for start in enough(range(0, n, rows), unit):
            some = keys[:, start : start + rows]
            s, m = similarity[: len(keys), : some.shape[1]], similar[: len(keys), : some.shape[1]]  # [heads, rows, N]
            torch.bmm(some, keys.transpose(-1, -2), out=s)
            s.diagonal(offset=start, dim1=-2, dim2=-1).zero_()
            last = torch.gt(s, threshold, out=m).mul_(place[block, None]).amax(dim=-1).long()  # [heads, rows]
            spared = torch.where(last > 0, by_place[block].gather(-1, last), default[block, start : start + rows])
            # Each row writes one place and adds nothing, so the result is the same in any order.
            s.scatter_(-1, spared[..., None], 0.0)
            total[block] += s.sum(dim=-2)
    return total


def _column_sums_by_kernel(
    view: LayerView, place: torch.Tensor, by_place: torch.Tensor, default: torch.Tensor, threshold: float
) -> torch.Tensor:
    """Return what `_column_sums` returns for the normalised keys of a view; Triton computes it from the stored keys."""
    keys = view.keys.detach()
    b, hk, n, d = keys.shape
    inverse, whole = (keys.new_empty(b * hk, n, dtype=torch.float32) for _ in range(2))
    total = keys.new_empty(b * hk, d, dtype=torch.float32)
    spared, cosine = (keys.new_empty(b * hk, n, dtype=torch.int64) for _ in range(2))
    if not keys.is_meta:  # the memory plan counts the tensors only
        from kvbench.eviction.terms.redundancy_kernel import launch

        keys = keys if keys.stride(-1) == 1 else keys.contiguous()
        results = inverse, total, whole, spared, cosine
        with torch.cuda.device(keys.device) if keys.is_cuda else nullcontext():
            launch(keys, view.mask, place, by_place, default, threshold, *results, ONE)
    taken = torch.zeros_like(cosine).scatter_add_(-1, spared, cosine)
    return whole.sub_(taken.float().mul_(1 / ONE))
