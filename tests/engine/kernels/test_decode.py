"""The Triton kernel computes what PyTorch computes, with bits that depend on the slot's own entries alone."""

from __future__ import annotations

import pytest
import torch

from kvbench.engine.kernels.backends import splits


def check(steps):
    worst = {
        dtype: max((s["error"], s["seed"]) for s in steps if s["dtype"] == dtype) for dtype in ("float32", "bfloat16")
    }
    assert worst["float32"][0] < 1e-5, worst
    assert worst["bfloat16"][0] < 2**-7, worst  # the interpreter cuts results to 8 bits; a GPU rounds weights, too
    assert all(s["varlen"] < 2**-6 for s in steps if s["varlen"] is not None)
    sums = [(s["summed"], s["seed"]) for s in steps if s["summed"] is not None]
    assert max(sums) < (1e-5, 0), max(sums)
    for fact in ("written", "same", "idle"):
        assert [s["seed"] for s in steps if not s[fact]] == [], fact


@pytest.mark.slow
def test_equal_to_pytorch(script):
    check(script("decode_cases.py", "200", "cpu", interpret=True))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_equal_to_pytorch_on_a_gpu(script):
    steps = script("decode_cases.py", "60", "cuda", "8", interpret=False)
    check(steps)
    assert torch.__version__ < "2.13" or any(s["varlen"] is not None for s in steps)


def test_splits_fill_the_device_and_bound_a_share():
    shapes = [(1152, 8), (1152, 8 * 8), (1152, 96 * 8), (33_024, 96 * 8), (33_024, 8), (300, 1), (17, 1)]
    assert [splits(rows, heads) for rows, heads in shapes] == [5, 5, 1, 9, 33, 2, 1]
