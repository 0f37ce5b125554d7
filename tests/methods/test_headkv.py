"""Budgets of headkv worked out by hand."""

from __future__ import annotations

import pytest
import torch

from kvbench.errors import UserError
from kvbench.eviction.api import Allocation
from kvbench.registry import methods


def shares(table, budget=26, window=6, layers=2, heads=2, held=100, **options):
    importance = torch.tensor(table, dtype=torch.float32)
    method = methods.get("headkv")(window=window, **options)
    return method.quotas(
        Allocation(
            budget=budget,
            layers=tuple(range(layers)),
            ordinals=tuple(range(layers)),
            layer_count=layers,
            query_heads=4,
            held=torch.full((1, layers, heads), held),
            seen=torch.tensor([held]),
            prompt_len=torch.tensor([held]),
            stats={},
            weights={"importance": importance},
        )
    )[0].tolist()


def test_headkv_without_preference_is_uniform():
    assert shares([[1.0] * 4] * 2) == [[26, 26], [26, 26]]
    assert shares([[0.0] * 4] * 2) == [[26, 26], [26, 26]]


def test_headkv_by_hand():
    """base 20, beta 2: heads keep 10 each, 40 are shared 1:0:3:4; the window of 6 besides."""
    assert shares([[1.0, 1, 0, 0], [3, 3, 4, 4]], beta=2.0) == [[6 + 10 + 5, 16], [16 + 15, 16 + 20]]
    # The mean over a group is what counts, and powers sharpen: 1, 0, 9, 16 of 26.
    assert shares([[0.0, 2, 0, 0], [6, 0, 0, 8]], beta=2.0) == [[21, 16], [31, 36]]
    got = shares([[1.0, 1, 0, 0], [3, 3, 4, 4]], beta=2.0, temp=2.0)
    assert got == [[17, 16], [30, 41]]
    assert sum(map(sum, got)) == 4 * 26


def test_headkv_leaves_every_head_an_entry_and_gives_surplus_away():
    assert shares([[1.0, 1, 0, 0], [0, 0, 0, 0]], beta=1.0) == [[6 + 80 - 3, 7], [7, 7]]
    assert shares([[1.0, 1, 0, 0], [0, 0, 0, 0]], beta=1.0, held=50) == [[50, 18], [18, 18]]
    for table in torch.rand(20, 2, 4, generator=torch.Generator().manual_seed(0)).tolist():
        got = shares(table, beta=1.1)
        assert sum(map(sum, got)) == 4 * 26
        assert min(map(min, got)) >= 7


def test_headkv_counts_only_layers_that_evict():
    """The table has every layer of the model; one that does not evict takes no share."""
    method = methods.get("headkv")(window=6, beta=2.0)
    allocation = Allocation(
        budget=26,
        layers=(0, 2),
        ordinals=(0, 1),
        layer_count=2,
        query_heads=2,
        held=torch.full((1, 2, 2), 100),
        seen=torch.tensor([100]),
        prompt_len=torch.tensor([100]),
        stats={},
        weights={"importance": torch.tensor([[1.0, 0], [50, 50], [3, 4]])},
    )
    assert method.quotas(allocation)[0].tolist() == [[21, 16], [31, 36]]


@pytest.mark.parametrize("table", [[[1.0, 1, 1]] * 2, [[1.0] * 4], [[1.0, -1, 0, 0]] * 2, [[float("nan")] * 4] * 2])
def test_headkv_refuses_an_unfit_table(table):
    with pytest.raises(UserError, match="headkv"):
        shares(table)


def test_headkv_names_its_table():
    assert methods.get("headkv")(table="mine.safetensors").weights().path == "mine.safetensors"
    assert methods.get("headkv").trained
