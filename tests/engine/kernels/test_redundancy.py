"""The Triton kernels of redundancy compute what PyTorch computes, with bits that depend on a head's own keys alone."""

from __future__ import annotations

import pytest
import torch


def check(cases):
    assert max((case["error"], case["seed"]) for case in cases)[0] < 1e-4, cases
    assert [case["seed"] for case in cases if not case["same"]] == []


@pytest.mark.slow
def test_equal_to_pytorch(script):
    check(script("redundancy_cases.py", "80", "cpu", interpret=True))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_equal_to_pytorch_on_a_gpu(script):
    check(script("redundancy_cases.py", "60", "cuda", "8", interpret=False))
