"""What commands do on a GPU is too slow for the pretended device, or cannot run there; these tests do without."""

from __future__ import annotations

import pytest

from kvbench.engine import loop, plan, steps
from kvbench.engine.kernels import backends
from kvbench.engine.setup import set_up


@pytest.fixture(autouse=True)
def _small_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plan.PROBES, "cuda", plan.PROBES["cpu"])


@pytest.fixture(autouse=True)
def _plain_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps attend and draw in PyTorch and are not compiled, evictions run no Triton kernel either;
    `engine/kernels/test_in_a_graph.py` runs the kernels."""
    monkeypatch.setattr(steps, "decode_with", lambda backend, cache: backends.decode_with("torch", cache))
    monkeypatch.setattr(steps, "draw_with", lambda backend: None)
    monkeypatch.setattr(steps, "CompiledLayers", lambda model, warn: None)
    monkeypatch.setattr(loop, "set_up", lambda *given, kernels, **named: set_up(*given, **named))
