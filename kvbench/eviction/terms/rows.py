"""Attention of single queries, smoothed along the text before a method reduces it over queries (arXiv 2510.13334)."""

from __future__ import annotations

from kvbench.eviction.view import LayerView
from kvbench.lazy import torch


def pooled_rows(view: LayerView, rows: torch.Tensor, kernel: int, among: torch.Tensor) -> torch.Tensor:
    """Return the attention `rows` [b, Hk, r, N] of r queries, average-pooled along the text and rescaled: each query's
    sum over the entries in `among` is unchanged.

    among: [b, Hk, N] bool, the entries that are pooled; the result is 0 at all others.
    """
    count = rows.shape[2]
    order, inside = (x.repeat_interleave(count, dim=1) for x in (view.text_order(), among))
    pooled = view.pool(rows.flatten(1, 2), "avg", kernel, inside, order).masked_fill_(~inside, 0.0).view_as(rows)
    whole = rows.masked_fill(~among[:, :, None], 0.0).sum(dim=-1, keepdim=True)
    return pooled * (whole / pooled.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny))
