"""The kernels compile for GPUs that are not here: no spills, and two blocks per multiprocessor that wait for memory."""

from __future__ import annotations

import pytest


@pytest.mark.slow
def test_no_spills_and_two_blocks_of_attention(script):
    figures = script("cubins.py", "--json", interpret=False)
    assert {f["sm"] for f in figures} == {80, 90, 100}
    kernels = {
        "_attend",
        "_combine",
        "_receive",
        "_threshold",
        "_best",
        "_norms",
        "_spare",
        "_normalise",
        "_pay",
        "_list",
        "_move",
    }
    assert {f["kernel"] for f in figures} == kernels
    for figure in figures:
        assert figure["spilled"] == 0, figure
        assert figure["blocks"] >= (1 if figure["kernel"] in ("_threshold", "_spare") else 2), figure
