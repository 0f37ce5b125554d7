"""The draft model of a small random model is another of its kind."""

from __future__ import annotations

import pytest
from support.models import build


@pytest.fixture(autouse=True)
def drafts(monkeypatch):
    monkeypatch.setattr("kvbench.engine.probes.load_draft", lambda loaded, name: build("qwen3"))
