"""Columns that are more than one number an entry with a fixed first value: one for each query head, or given at birth.

QueryHeadColumn("sum")    becomes sum.0, sum.1 ... in a cache, one for each query head of a KV head's group
GivenColumn("log_beta")   has the values that `on_tokens` answers for new tokens
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvbench.eviction.api import Column
from kvbench.lazy import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryHeadColumn(Column):
    """A column for every query head that shares a KV head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenColumn(Column):
    """A column whose values come with the token; `init` is what an entry has without them."""

    init: float = float("nan")


def expanded(columns: Sequence[Column], group: int) -> tuple[Column, ...]:
    """The columns as a cache stores them, for `group` query heads a KV head."""
    found: list[Column] = []
    for column in columns:
        if isinstance(column, QueryHeadColumn):
            found += [Column(name=f"{column.name}.{head}", init=column.init) for head in range(group)]
        else:
            found.append(column)
    return tuple(found)


def stacked(columns: Mapping[str, torch.Tensor], name: str, group: int) -> torch.Tensor:
    """[b, Hk, g, N]: the values that a `QueryHeadColumn` has."""
    return torch.stack([columns[f"{name}.{head}"] for head in range(group)], dim=2)


def unstacked(name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """New values of a `QueryHeadColumn` from [b, Hk, g, N]."""
    return {f"{name}.{head}": values[:, :, head] for head in range(values.shape[2])}


def fixed(columns: Sequence[Column]) -> tuple[Column, ...]:
    """The columns that begin with their `init`, whatever the token."""
    return tuple(column for column in columns if not isinstance(column, GivenColumn))
