"""Built-in recipes with other defaults, for tests that must stay small."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvbench.registry import recipes
from kvbench.train.catalogue import entry_of
from kvbench.train.entry import FLAGS, Entry


def change(patch: pytest.MonkeyPatch, name: str, **changes: Any) -> Entry:
    """Give a registered recipe other defaults until the patch is undone; return its new entry."""
    entry = replace(entry_of(name), **changes)
    patch.setitem(recipes._members, name, entry)
    return entry


def options_of(entry: Entry, model: str = "tiny", preset: str | None = None) -> dict[str, Any]:
    """The settings that `prepare` takes as options: those without flags of their own."""
    return {name: value for name, value in entry.settings(model, preset).items() if name not in FLAGS}
