"""The kernels draw the tokens of the CPU's sampler."""

from __future__ import annotations

import pytest
import torch


def check(draws):
    for draw in draws:
        got, want = draw["got"], draw["want"]
        assert got == want, draw
    assert {(d["nan"], d["tied"]) for d in draws} == {(True, False), (False, True), (False, False)}


@pytest.mark.slow
def test_the_cpu_s_tokens(script):
    check(script("sample_cases.py", "72", "cpu", interpret=True))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_cpu_s_tokens_on_a_gpu(script):
    check(script("sample_cases.py", "900", "cuda", interpret=False))
