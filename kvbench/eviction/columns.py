"""Two special kinds of column: one has a value per query head, in the other the method gives each new entry
its initial value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvbench.eviction.declare import Column
from kvbench.lazy import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryHeadColumn(Column):
    """A column with one value per query head of a KV head's group, stored as `name`.0, `name`.1 ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenColumn(Column):
    """A column in which every new entry starts with a value that `Method.on_tokens` computes, instead of `init`."""

    init: float = float("nan")


def expanded(columns: Sequence[Column], group: int) -> tuple[Column, ...]:
    """Return the columns as a cache stores them: a `QueryHeadColumn` becomes `group` columns, one per query head."""
    stored: list[Column] = []
    for column in columns:
        if isinstance(column, QueryHeadColumn):
            stored += [Column(name=f"{column.name}.{head}", init=column.init) for head in range(group)]
        else:
            stored.append(column)
    return tuple(stored)


def stacked(columns: Mapping[str, torch.Tensor], name: str, group: int) -> torch.Tensor:
    """Return the values of a `QueryHeadColumn` as one tensor, [b, Hk, g, N]."""
    return torch.stack([columns[f"{name}.{head}"] for head in range(group)], dim=2)


def unstacked(name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Split values [b, Hk, g, N] of a `QueryHeadColumn` into its stored columns, by their names."""
    return {f"{name}.{head}": values[:, :, head] for head in range(values.shape[2])}


def fixed(columns: Sequence[Column]) -> tuple[Column, ...]:
    """Return all columns except each `GivenColumn`. In the returned columns every new entry starts with `init`."""
    return tuple(column for column in columns if not isinstance(column, GivenColumn))
