"""The draft model of a small random model is another of its kind."""

from __future__ import annotations

import pytest
from support.models import build


@pytest.fixture(autouse=True)
def drafts(monkeypatch):
    for module in ("engine.loop", "integrations.transformers_cache"):
        monkeypatch.setattr(f"kvbench.{module}.load_draft", lambda loaded: lambda name: build("qwen3"))
