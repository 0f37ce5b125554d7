"""The engine decodes with the Triton kernel from a graph; the kernel runs in Triton's interpreter."""

from __future__ import annotations


def test_tokens_and_usage_are_those_of_the_cpu(script):
    divided, *cases = script("graph_cases.py", interpret=True)
    assert (divided["equal"], divided["decoding"]) == (True, "triton")  # every kernel on its layer's GPU
    assert len(cases) == 12
    for case in cases:
        assert (case["equal"], case["decoding"], case["cost"]) == (True, "triton graph", [1, 0]), case
