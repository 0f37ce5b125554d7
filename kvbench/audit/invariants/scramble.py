"""Copies a view (what a method sees of a layer's cache), with entries in another order or invalid entries added."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvbench.eviction.view import LayerView

JUNK = 5  # invalid entries added per head


def scrambled(view: LayerView, seed: int, junk: float | None) -> LayerView:
    """Return a copy of a view, with the entries of every head in random order. junk: fill the keys, values and columns
    of added invalid entries with this number; None adds no entries."""
    b, heads, n = view.positions.shape
    generator = torch.Generator().manual_seed(seed)
    extra = 0 if junk is None else JUNK
    order = torch.rand(b, heads, n + extra, generator=generator).argsort(dim=-1).to(view.positions.device)
    stale = torch.randint(0, int(view.seen.min()), (b, heads, extra), generator=generator).to(order.device)

    def mixed(x: torch.Tensor, fill: torch.Tensor | float) -> torch.Tensor:
        if not isinstance(fill, torch.Tensor):
            fill = torch.full((b, heads, extra, *x.shape[3:]), fill, dtype=x.dtype, device=x.device)
        x = torch.cat([x, fill.to(x.dtype)], dim=2)
        return x.gather(2, order if x.dim() == 3 else order[..., None].expand(-1, -1, -1, x.shape[-1]))

    def mixed_sums(x: torch.Tensor) -> torch.Tensor:
        return mixed(x.transpose(2, 3), 0.0).transpose(2, 3)

    value = 0.0 if junk is None else junk
    return dataclasses.replace(
        view,
        keys=mixed(view.keys, value),
        values=None if view.values is None else mixed(view.values, value),
        positions=mixed(view.positions, stale),
        valid=mixed(view.valid, False),
        whole=view.whole and not extra,
        columns={name: mixed(column, value) for name, column in view.columns.items()},
        sums=None if view.sums is None else mixed_sums(view.sums),
        newest_sums={count: mixed_sums(sums) for count, sums in view.newest_sums.items()},
    )


def mapped(view: LayerView, change: Callable[[torch.Tensor], torch.Tensor]) -> LayerView:
    """Return a copy of the view in which every tensor x is replaced by change(x). Only the weights that the method
    loaded from a file stay unchanged."""
    changes: dict[str, Any] = {}
    for f in (f for f in dataclasses.fields(view) if f.init):
        value = getattr(view, f.name)
        if isinstance(value, torch.Tensor):
            changes[f.name] = change(value)
        elif isinstance(value, Mapping) and f.name != "weights":
            changes[f.name] = {name: change(tensor) for name, tensor in value.items()}
    return dataclasses.replace(view, **changes)


def by_position(x: torch.Tensor, view: LayerView) -> torch.Tensor:
    """Sort values of entries by the entries' positions in the sequence. x: [sequences, KV heads, entries]. Returns
    [sequences, KV heads, tokens seen], with 0 at positions without a valid entry."""
    end = int(view.seen.max())
    at = torch.where(view.valid, view.positions, end)
    table = torch.zeros(*at.shape[:2], end + 1, dtype=torch.float64, device=x.device)
    return table.scatter_(2, at, x.to(torch.float64))[..., :end]


def largest_change(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest absolute difference between two tensors, divided by the largest finite absolute value in the
    first tensor."""
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    difference = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=float("inf"))
    finite = a[torch.isfinite(a)]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    return float(difference.max() if difference.numel() else 0.0) / (scale or 1.0)
