"""Columns of query heads, and columns that come with tokens."""

from __future__ import annotations

import torch

from kvbench.eviction.api import Column
from kvbench.eviction.columns import GivenColumn, QueryHeadColumn, expanded, fixed, stacked, unstacked


def test_every_query_head_gets_a_column():
    plain, given = Column(name="a", init=3.0), GivenColumn(name="b")
    made = expanded([plain, QueryHeadColumn(name="c", init=2.0), given], 3)
    assert made == (plain, *(Column(name=f"c.{head}", init=2.0) for head in range(3)), given)
    assert fixed(made) == made[:-1]


def test_values_of_query_heads_come_back_as_they_went():
    values = torch.rand(2, 3, 4, 5)
    columns = unstacked("c", values)
    assert set(columns) == {"c.0", "c.1", "c.2", "c.3"}
    assert torch.equal(stacked(columns, "c", 4), values)
