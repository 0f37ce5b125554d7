"""The Triton kernels of compaction leave the same bits in a cache as PyTorch does."""

from __future__ import annotations

import pytest
import torch


def check(cases):
    assert [case for case in cases if case["different"]] == []
    assert [case for case in cases if case["error"][0] != case["error"][1]] == []
    assert {case["layout"] for case in cases} == {"dense", "paged"}
    assert any(case["error"][0] for case in cases)


@pytest.mark.slow
def test_equal_to_pytorch(script):
    check(script("compaction_cases.py", "120", "cpu", interpret=True))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_equal_to_pytorch_on_a_gpu(script):
    check(script("compaction_cases.py", "60", "cuda", "8", interpret=False))
