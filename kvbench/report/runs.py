"""Short descriptions of the runs in a results folder, for ``kvbench list runs``. No torch.

    for run in described(Path("results")):
        run["name"], run["rows"], run["status"]

A folder may come from anywhere: a run that cannot be read is described too, with the reason as its note.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvbench.config.settings import DEFAULTS
from kvbench.console.redact import redact_config
from kvbench.errors import KVBenchError
from kvbench.report.cells import method_label
from kvbench.store import list_runs, manifest, read_run
from kvbench.store.identity import canonical_json

# The status of a row, and the settings that tell cells apart.
COLUMNS = ("status", "task", "method", "options", "budget", "budget_share", "interval")


def described(results: Path) -> Iterator[dict[str, Any]]:
    """Yield a description of each run, in order of names."""
    for name in list_runs(results):
        try:
            yield _entry(results / name)
        except KVBenchError as error:
            empty: dict[str, Any] = dict.fromkeys(("model", "settings", "rows", "created"))
            empty |= {"tasks": [], "methods": [], "budgets": []}
            yield {"name": name, **empty, "status": "cannot be read", "note": str(error).splitlines()[0]}


def _entry(folder: Path) -> dict[str, Any]:
    info = manifest.read(folder)
    snapshot = read_run(folder, COLUMNS)
    config = redact_config(info["config"])
    grids = config.get("grids", [])
    return {
        "name": folder.name,
        "model": config.get("model"),
        "tasks": list(dict.fromkeys(task for grid in grids for task in grid.get("tasks", []))),
        "methods": list(dict.fromkeys(_method(method) for grid in grids for method in grid.get("methods", []))),
        "budgets": list(dict.fromkeys(str(budget) for grid in grids for budget in grid.get("budgets", []))),
        "settings": _settings(config | _intervals(config)),
        "rows": snapshot.progress.removesuffix(" rows"),
        "created": info["created"],
        "status": _status(snapshot.table.column("status").to_pylist(), snapshot.saved, snapshot.planned),
        "note": None,
    }


def _method(method: Mapping[str, Any]) -> str:
    """Return the method as tables name it, with the options that differ from its defaults: ``gkv(lam=0.0)``."""
    return method_label(method["name"], canonical_json(method.get("options", {})))


def _intervals(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return {"interval": LIST} with all intervals of a run that has several; an empty dictionary for other runs."""
    own = config.get("interval")
    intervals = {each for grid in config.get("grids", []) for each in grid.get("intervals") or [own]}
    return {"interval": sorted(intervals)} if len(intervals) > 1 else {}


def _settings(config: Mapping[str, Any]) -> str | None:
    """Return the settings that differ from their defaults, as in "limit 8, seed 1"; None without such settings. The
    model is left out, because it has a column of its own."""
    own = {name: value for name, value in config.items() if value is not None and value != DEFAULTS.get(name, value)}
    return ", ".join(f"{name} {_shown(value)}" for name, value in own.items() if name != "model") or None


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else canonical_json(value)


def _status(rows: list[str], saved: int, planned: int | None) -> str:
    """Return "complete", or what is missing, as in "12 not scored, 3 failed, unfinished"."""
    waiting, failed = rows.count("unscored"), len(rows) - saved
    parts = [f"{waiting} not scored"] * bool(waiting) + [f"{failed} failed"] * bool(failed)
    if planned is not None and saved < planned and saved + failed < planned:
        parts.append("unfinished")
    return ", ".join(parts) or "complete"
