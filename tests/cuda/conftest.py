"""The probes of a GPU's speed would take a CPU many seconds."""

from __future__ import annotations

import pytest

from kvbench.engine import plan


@pytest.fixture(autouse=True)
def _small_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plan.PROBES, "cuda", plan.PROBES["cpu"])
