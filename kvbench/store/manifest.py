"""run.json: what a run is. Written once, before any work; compared whenever the run is opened again.

It holds the format, the whole configuration with its hash, the number of planned rows, the environment and the
command, all redacted. A configuration edited by hand no longer has its hash and is refused: rows made under two
settings must not mix.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvbench.errors import SetupError, UserError, show
from kvbench.store.files import bare, reason, replacing
from kvbench.store.identity import config_hash
from kvbench.store.redact import redact_argv, redact_config
from kvbench.store.schema import FORMAT

NAME = "run.json"
VERSIONS = ("kvbench_version", "torch_version", "transformers_version")

Differences = dict[str, tuple[Any, Any]]  # setting -> (the run's value, the other value)


def build(
    name: str, config: Mapping[str, Any], environment: Mapping[str, Any], command: Sequence[str], planned: int | None
) -> dict[str, Any]:
    """The content of a new run.json."""
    stored = plain(config)
    return {
        "format": FORMAT,
        "name": name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": stored,
        "config_hash": config_hash(stored),
        "planned": planned,
        "environment": plain(environment),
        "command": redact_argv(command),
    }


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they come back from JSON, without secrets."""
    redacted: dict[str, Any] = json.loads(json.dumps(redact_config(settings), allow_nan=False))
    return redacted


def write(run_dir: Path, manifest: Mapping[str, Any]) -> None:
    """Put run.json in place, whole or not at all."""
    try:
        with replacing(run_dir / NAME) as file:
            file.write(json.dumps(manifest, indent=2).encode() + b"\n")
    except OSError as error:
        raise SetupError(f"cannot write in {show(run_dir)} ({reason(error)}). Nothing was run.") from error


def read(run_dir: Path) -> dict[str, Any]:
    """The content of run.json, checked.

    Raises:
        UserError: there is none, it was made by a newer kvbench, or it was changed by hand.
        SetupError: it cannot be read.
    """
    path = run_dir / NAME
    try:
        manifest = json.loads(path.read_bytes())
        format, config, stated = manifest["format"], manifest["config"], manifest["config_hash"]
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{show(run_dir)} has no kvbench run (no {NAME}).") from None
    except OSError as error:
        raise SetupError(f"cannot read {show(path)} ({reason(error)}).") from error
    except (ValueError, KeyError, TypeError):
        raise SetupError(
            f"{show(path)} is damaged. Put back a copy of it, or start a new run with --run-name."
        ) from None
    check_format(NAME, format)
    if config_hash(config) != stated:
        raise UserError(
            f"{show(path)} was changed by hand: its configuration hash differs. "
            f"Undo that, or start a new run with --run-name."
        )
    checked: dict[str, Any] = manifest
    return checked


def check_format(file: str, format: object) -> None:
    """Raise UserError when the file was written by a newer kvbench."""
    if not isinstance(format, int) or format > FORMAT:
        reads = "1" if FORMAT == 1 else f"1 to {FORMAT}"
        raise UserError(f"{bare(file)} has format {bare(format)}; this kvbench reads {reads}. Update kvbench.")


def differences(run: Mapping[str, Any], other: Mapping[str, Any], *, only_given: bool = False) -> Differences:
    """Settings that differ, nested ones by dotted name; none is as good as missing.

    With `only_given`, settings that `other` lacks do not count.
    """
    ours, theirs = _flat(run), _flat(other)
    names = theirs if only_given else {**ours, **theirs}
    return {n: (ours.get(n), theirs.get(n)) for n in names if ours.get(n) != theirs.get(n)}


def value(setting: Any) -> str:
    """A setting's value in a message: strings quoted, grids by what they run, the rest as JSON; null is the default."""
    if setting is None:
        return "default"
    if isinstance(setting, list) and setting and all(isinstance(g, dict) and "methods" in g for g in setting):
        return "; ".join(_grid(grid) for grid in setting)
    return show(setting) if isinstance(setting, str) else json.dumps(setting)


def _grid(grid: Mapping[str, Any]) -> str:
    """``full, gkv(window=8) at 48, 25% on walk``."""
    options = [", ".join(f"{k}={v}" for k, v in sorted(m.get("options", {}).items())) for m in grid["methods"]]
    methods = ", ".join(m["name"] + (f"({o})" if o else "") for m, o in zip(grid["methods"], options))
    budgets = ", ".join(map(str, grid.get("budgets", [])))
    limit = f" (limit {grid['limit']})" if grid.get("limit") is not None else ""
    return bare(f"{methods}{f' at {budgets}' if budgets else ''} on {', '.join(grid.get('tasks', []))}{limit}")


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, setting in settings.items():
        if isinstance(setting, dict):
            flat.update(_flat(setting, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = setting
    return flat
