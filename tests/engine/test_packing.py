"""Packed linear layers against the default ones."""

from __future__ import annotations

import pytest
import torch
from support.models import build, requests

from kvbench import registry
from kvbench.engine.loop import Engine
from kvbench.engine.model import packing
from kvbench.engine.model.packing import packed_linears

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch is built without oneDNN")


def network(bias: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(512, 512, bias=bias), torch.nn.Linear(512, 8, bias=bias)).eval()


@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_equal_to_the_default_up_to_rounding_and_undone_afterwards(bias):
    model, x = network(bias), torch.randn(8, 1, 512)
    want = model(x)
    with packed_linears(model, 8) as count:
        assert count == 1  # the small layer stays
        got = model(x)
        assert not got.equal(want) or count == 0
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert model(x).equal(want)


BF16 = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="oneDNN does not multiply bfloat16 on this processor",
)
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=BF16)]


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_any_place_beside_any_rows(dtype):
    for rows in (2, 5, 8, 32, 100):
        model, x = network(True).to(dtype), torch.randn(rows, 512, dtype=dtype)
        with packed_linears(model, rows) as count:
            assert count == 1
            together = model(x)
            order = torch.randperm(rows)
            assert model(x[order]).equal(together[order])
            alone = torch.zeros_like(x)
            alone[0] = x[0]
            assert model(alone)[0].equal(together[0])


@BF16
@torch.inference_mode()
def test_bfloat16_within_its_rounding_for_one_row_too():
    for rows in (1, 8):
        model, x = network(True).bfloat16(), torch.randn(rows, 512).bfloat16()
        want = model(x)
        with packed_linears(model, rows) as count:
            assert count == 1
            torch.testing.assert_close(model(x), want, rtol=2e-2, atol=2e-2)


def test_single_rows_of_float32_and_other_dtypes_stay_as_they_are(monkeypatch):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    for dtype, rows in ((torch.float32, 1), (torch.float16, 8), (torch.bfloat16, 8)):
        with packed_linears(network(True).to(dtype), rows) as count:
            assert count == 0


def test_the_engine_gives_the_same_tokens(monkeypatch):
    loaded = build("qwen3")
    todo = requests(lengths=(9, 60, 33), new_tokens=(50, 40, 60), samples=2)

    def tokens():
        method = registry.methods.get("gkv")()
        engine = Engine(loaded, method, budget=24, interval=8, slots=4, max_tokens=200)
        return {(d.request.doc_id, d.sample): d.token_ids for d in engine.generate(todo)}

    plain = tokens()
    monkeypatch.setattr(packing, "FEWEST_WEIGHTS", 1)
    assert tokens() == plain
