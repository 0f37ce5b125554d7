"""The runs of a results folder in short, for ``kvbench list runs``. No torch.

    for entry in described(Path("results")):
        entry["name"], entry["rows"], entry["status"]

A folder may come from anywhere: a run that cannot be read is an entry too, with the reason as its note.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvbench.console.redact import redact_config
from kvbench.errors import KVBenchError
from kvbench.store import list_runs, manifest, read_run

COLUMNS = ("status", "task", "method", "options", "budget", "budget_share")  # of the rows; they tell cells apart


def described(results: Path) -> Iterator[dict[str, Any]]:
    """One entry per run, in order of names."""
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
        "methods": list(dict.fromkeys(method["name"] for grid in grids for method in grid.get("methods", []))),
        "rows": snapshot.progress.removesuffix(" rows"),
        "created": info["created"],
        "status": _status(snapshot.table.column("status").to_pylist(), snapshot.saved, snapshot.planned),
        "note": None,
    }


def _status(rows: list[str], saved: int, planned: int | None) -> str:
    """ "complete", or what is missing: "12 not scored, 3 failed, unfinished"."""
    waiting, failed = rows.count("unscored"), len(rows) - saved
    parts = [f"{waiting} not scored"] * bool(waiting) + [f"{failed} failed"] * bool(failed)
    if planned is not None and saved < planned and saved + failed < planned:
        parts.append("unfinished")
    return ", ".join(parts) or "complete"
