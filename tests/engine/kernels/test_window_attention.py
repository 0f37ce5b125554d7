"""The Triton kernels of `window_attention` compute what PyTorch computes, with bits that depend on a head alone."""

from __future__ import annotations

import pytest
import torch


def check(cases):
    assert max((case["error"], case["seed"]) for case in cases)[0] < 1e-5, cases
    for fact in ("same", "shape", "nan"):
        assert [case["seed"] for case in cases if not case[fact]] == [], fact


@pytest.mark.slow
def test_equal_to_pytorch(script):
    check(script("window_attention_cases.py", "120", "cpu", interpret=True))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_equal_to_pytorch_on_a_gpu(script):
    check(script("window_attention_cases.py", "60", "cuda", "8", interpret=False))
