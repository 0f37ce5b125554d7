"""Remembered results of operators on meta tensors equal those that torch computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvbench.engine.model import meta_results
from kvbench.engine.model.meta_results import call

aten: Any = torch.ops.aten


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_results, "_known", {})


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


CALLS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "two shapes": (aten.add.Tensor, lambda: (meta(4, 1), meta(3)), {}),
    "strides": (aten.neg.default, lambda: (meta(4, 3).t(),), {}),
    "a list": (aten.cat.default, lambda: ([meta(2, 3), meta(1, 3)],), {}),
    "several results": (aten.topk.default, lambda: (meta(4, 9), 2), {}),
    "another dtype": (aten._to_copy.default, lambda: (meta(4),), {"dtype": torch.bfloat16}),
    "a list of results": (aten.split_copy.Tensor, lambda: (meta(4, 9), 2), {}),
    "reduced": (aten.sum.dim_IntList, lambda: (meta(4, 5, dtype=torch.int32), [1]), {"keepdim": True}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_remembered_result_has_the_sizes_of_a_computed_one(name: str) -> None:
    func, args, kwargs = CALLS[name]
    computed = func(*args(), **kwargs)
    first, again = (call(func, args(), kwargs) for _ in range(2))
    assert len(meta_results._known) == 1
    for one in (first, again):
        pairs = list(zip(computed, one, strict=True)) if isinstance(computed, (list, tuple)) else [(computed, one)]
        for a, b in pairs:
            assert (a.shape, a.stride(), a.dtype, b.device.type) == (b.shape, b.stride(), b.dtype, "meta")
            assert a.untyped_storage().nbytes() == b.untyped_storage().nbytes()
    assert type(computed) is type(again)


def test_numbers_of_other_types_are_other_calls() -> None:
    whole = meta(3, dtype=torch.int64)
    dtypes = [call(aten.mul.Tensor, (whole, number), {}).dtype for number in (1, 1.0, True, 1, 1.0, True)]
    assert dtypes == [torch.int64, torch.float32, torch.int64] * 2


def test_an_operator_in_place_returns_its_argument() -> None:
    for _ in range(2):
        x = meta(4, 3)
        assert call(aten.clamp_.default, (x, 0), {}) is x


def test_views_and_operators_that_change_an_argument_are_computed_every_time() -> None:
    for _ in range(2):
        x = meta(4, 3)
        assert call(aten._unsafe_view.default, (x, [12]), {}).untyped_storage() is x.untyped_storage()
        assert call(aten.transpose.int, (x, 0, 1), {}).untyped_storage() is x.untyped_storage()
        call(aten.resize_.default, (x, [2, 2]), {})
        assert x.shape == (2, 2)
        assert call(aten.expand.default, (meta(1, 3), [4, 3]), {}).untyped_storage().nbytes() == 12
    assert meta_results._known == {}


def test_an_operator_without_results() -> None:
    for _ in range(2):
        assert len(call(aten.unbind.int, (meta(0, 3),), {})) == 0


def test_tensors_with_values_are_computed_every_time() -> None:
    for _ in range(2):
        assert call(aten.add.Tensor, (torch.ones(2), torch.ones(2)), {}).tolist() == [2, 2]
        assert call(aten.full.default, ([2], 1.0), {}).tolist() == [1, 1]
    assert meta_results._known == {}


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_results, "MOST", 3)
    for length in range(1, 9):
        assert call(aten.neg.default, (meta(length),), {}).shape == (length,)
        assert len(meta_results._known) <= 3
