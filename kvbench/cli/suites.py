"""Describes the suites that ship with kvbench, for ``kvbench list suites``. No torch."""

from __future__ import annotations

from typing import Any

from kvbench.cli.request import build
from kvbench.config.layers import about, gather, suite_path, suites
from kvbench.config.run_config import RunConfig
from kvbench.console.problems import Problems
from kvbench.errors import UserError, quote
from kvbench.eviction.budget import label


def listed() -> list[dict[str, Any]]:
    """Return a line for each suite: its name, its purpose or the paper's table that it repeats, its number of cells,
    and what it needs."""
    return [_line(name, about(name), _config(name)) for name in suites()]


def one(name: str) -> dict[str, Any]:
    """Return all facts about one suite. Raises UserError for an unknown name."""
    path = suite_path(name)
    if path not in suites().values():
        raise UserError(
            f"{quote(name)} does not ship with kvbench. 'kvbench list suites' names the suites that do; 'kvbench run "
            "--suite FILE --dry-run' shows the plan of your own."
        )
    name = path.stem
    told, config = about(name), _config(name)
    return {
        **_line(name, told, config),
        **{key: told[key] for key in ("same", "differs") if key in told},
        "model": config.model,
        "methods": [method.label for method in config.methods],
        "budgets": [label(size) for size in config.budgets],
        "intervals": list(config.intervals),
        "tasks": list(config.tasks),
        "file": str(path),
    }


def _line(name: str, told: dict[str, str], config: RunConfig) -> dict[str, Any]:
    shown = told.get("table") or told["what"]
    return {"name": name, "table": shown, "cells": len(config.cells()), "needs": told.get("needs")}


def _config(name: str) -> RunConfig:
    problems = Problems()
    config = build(gather({}, {}, name), problems)
    problems.stop()
    assert config is not None
    return config
