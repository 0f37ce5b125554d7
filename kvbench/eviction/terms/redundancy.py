"""How much each cached key repeats others: the redundancy of R-KV (arXiv 2505.24133), which G-KV shares.

Cosine similarities of all keys of a head, diagonal 0; in each key's row the most recent similar key (cosine above the
threshold) is spared, so that of several copies the newest survives; the mean over rows and a softmax give one number
per entry.
"""

from __future__ import annotations

from typing import Literal

from kvbench.eviction.view import LayerView
from kvbench.lazy import torch

# Similarities at a time: 256 MiB; on a CPU, as many as its cache holds.
SCRATCH_FLOATS = 1 << 26
CPU_SCRATCH_FLOATS = 1 << 17


def redundancy(
    view: LayerView,
    threshold: float,
    order: torch.Tensor,
    *,
    spare: Literal["last", "first"] = "last",
    column_zero: bool = False,
) -> torch.Tensor:
    """Redundancy of every entry, [b, Hk, N] float32, summing to 1 over the valid entries of a head.

    Args:
        threshold: cosine above which two keys count as similar, 0 or more.
        order: [b, Hk, N] indices that list the entries, as `LayerView.text_order` does; "last" follows it.
        spare: which of the similar keys a row spares: the last or the first.
        column_zero: reproduce the released R-KV code, which spares the first entry of all where a row has no similar
            key, and in every row where `spare` is "first".
    """
    b, hk, n, d = view.keys.shape
    heads = b * hk
    keys = view.keys.detach().float()
    unit = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
    # Entries that are not valid become zero vectors: similar to nothing, adding nothing.
    unit = unit.masked_fill_(~view.valid[..., None], 0.0).view(heads, n, d)
    order = order.reshape(heads, n)
    own = torch.arange(n, device=order.device).expand(heads, n)
    # Places 1..n: the highest place among a row's similar keys marks the spared one; 0: no key is similar.
    places = torch.arange(1, n + 1, dtype=unit.dtype, device=unit.device)
    if spare == "first":
        places = torch.zeros_like(places) if column_zero else places.flip(0)
    place = torch.empty(heads, n, dtype=unit.dtype, device=unit.device).scatter_(-1, order, places.expand_as(order))
    by_place = torch.cat([order[:, :1], order if spare == "last" else order.flip(-1)], dim=-1)
    # Without a similar key a row spares its own, which is 0 already.
    default = order[:, :1].expand_as(order) if column_zero else own
    mean = _column_sums(unit, place, by_place, default, threshold).view(b, hk, n) / view.valid.sum(-1, keepdim=True)
    return mean.masked_fill(~view.valid, float("-inf")).softmax(dim=-1)


def _column_sums(
    unit: torch.Tensor, place: torch.Tensor, by_place: torch.Tensor, default: torch.Tensor, threshold: float
) -> torch.Tensor:
    """[h, N] sums over the rows of the similarities that are left.

    unit: [h, N, d]; place: [h, N], 0..N; by_place: [h, N + 1], the entry at each place; default: [h, N], the entry
    spared in a row where no key is similar.
    """
    h, n, _ = unit.shape
    scratch = CPU_SCRATCH_FLOATS if unit.device.type == "cpu" else SCRATCH_FLOATS
    rows = max(1, min(n, scratch // n))  # independent of h, so that sums do not depend on the batch
    heads = max(1, min(h, scratch // (n * rows)))
    # Two buffers for all blocks: on a CPU, fresh pages would cost more than the arithmetic.
    similarity, similar = unit.new_empty(heads, rows, n), unit.new_empty(heads, rows, n)
    total = unit.new_zeros(h, n)
    for first in range(0, h, heads):
        block = slice(first, first + heads)
        keys = unit[block]
        for start in range(0, n, rows):
            some = keys[:, start : start + rows]
            s, m = similarity[: len(keys), : some.shape[1]], similar[: len(keys), : some.shape[1]]  # [heads, rows, N]
            torch.bmm(some, keys.transpose(-1, -2), out=s)
            s.diagonal(offset=start, dim1=-2, dim2=-1).zero_()
            last = torch.gt(s, threshold, out=m).mul_(place[block, None]).amax(dim=-1).long()  # [heads, rows]
            spared = torch.where(last > 0, by_place[block].gather(-1, last), default[block, start : start + rows])
            # One place per row: no addition, so sums are exact in any order.
            s.scatter_(-1, spared[..., None], 0.0)
            total[block] += s.sum(dim=-2)
    return total
