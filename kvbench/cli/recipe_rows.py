"""What ``kvbench list recipes`` prints: each recipe with its presets, or one recipe with its settings. Imports no
torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvbench.registry import recipes
from kvbench.train.catalogue import entry_of
from kvbench.train.entry import FLAGS, Entry, Preset


def recipe_rows() -> list[dict[str, Any]]:
    return [_row(name, entry_of(name)) for name in recipes.names()]


def recipe_row(name: str) -> dict[str, Any]:
    """Return a recipe with all settings: their defaults, and each preset's values that differ from the defaults. Raises
    UserError for an unknown name."""
    name = recipes.canonical(name)
    entry = entry_of(name)
    about = _row(name, entry)
    del about["presets"]  # names only; the presets themselves follow below
    presets = [row for preset, values in entry.presets.items() for row in _preset(preset, values)]
    settings = [_setting(entry, setting) for setting in entry.defaults()]
    return about | {"tasks": list(entry.tasks), "presets": presets, "settings": settings}


def _row(name: str, entry: Entry) -> dict[str, Any]:
    return {
        "name": name,
        "learns from": entry.learns_from,
        "presets": list(entry.presets),
        "about": entry.about,
    }


def _preset(name: str, preset: Preset) -> Iterator[dict[str, Any]]:
    """Yield a line about a preset, and a line for each model for which the preset has separate values."""
    yield {"preset": name, "about": preset.about}
    for model, values in preset.models.items():
        yield {"preset": f"{name}, {model}", "about": ", ".join(f"{key}={value}" for key, value in values.items())}


def _setting(entry: Entry, name: str) -> dict[str, Any]:
    """Return a line with a setting's default and its value in each preset that changes the default."""
    default = entry.defaults()[name]
    values = {preset: made.values.get(name) for preset, made in entry.presets.items()}
    changes = {preset: None if value == default else value for preset, value in values.items()}
    return {"setting": f"--{name.replace('_', '-')}" if name in FLAGS else name, "default": default} | changes
