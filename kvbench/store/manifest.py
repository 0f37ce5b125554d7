"""Writes, reads and compares run.json, the record of a run. The record is written before any work, and replaced only
by `RunFolder.open` with `anew`. Whenever the run is continued, the new settings are compared with those in the record.

The record holds the format, the whole configuration, the number of planned rows, the environment, the command, and a
hash of each part and of the whole. A record that was edited by hand no longer matches its hashes and is refused,
because rows of two settings must not mix. The hashes reveal mistakes, not malice. A name in run.json is therefore no
reason for kvbench to import a module or to contact a server (docs/security.md).

Settings are stored as the user gave them, but without secrets. A run can therefore be continued with the stored
settings. If two configurations differ in secrets only, kvbench takes them for equal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvbench.console.redact import hide_keys, hide_secrets, redact_argv, redact_config
from kvbench.errors import NEW_RUN, SetupError, UserError, bare, quote
from kvbench.store.files import read_plain, reason, replacing, unwritable
from kvbench.store.identity import digest
from kvbench.store.schema import FORMAT
from kvbench.store.shape import LONGEST, wrong_part
from kvbench.store.strict_json import document

NAME = "run.json"
VERSIONS = ("kvbench_version", "torch_version", "transformers_version")
# These parts of the environment are stored as the user gave them, because kvbench uses, compares or shows them in full
# later. All other parts are redacted, as is the command: secrets and the user's name in paths are hidden.
AS_GIVEN = (
    *("data", "data_variable", "data_revision", "plugin", "judge", "judge_model", "judge_key_env"),
    *("model_files", "methods", "method_files"),
)

HOST = ("device",)  # settings that run.json states and that may differ when a run is continued: a host chooses them

_LARGEST = 64 << 20  # most bytes of a run.json; with thousands of cells it has some megabytes

Differences = dict[str, tuple[Any, Any]]  # name of the setting -> (the run's value, the other value)


def build(
    name: str, config: Mapping[str, Any], environment: Mapping[str, Any], command: Sequence[str], planned: int | None
) -> dict[str, Any]:
    """Return the content of a new run.json. config: all settings. environment: versions, devices and inputs. command:
    the words of the command line. planned: the number of rows; None: unknown."""
    content = {
        "format": FORMAT,
        "name": name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": plain(config),
        "planned": planned,
        "environment": surroundings(environment),
        "command": redact_argv(command),
    }
    return content | _hashes(content)


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in JSON types, without secrets. A tuple becomes a list."""
    return as_json(hide_secrets(settings))


def surroundings(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the environment in JSON types, redacted except for the parts in `AS_GIVEN`, which lose only secrets."""
    return as_json(redact_config(environment)) | plain({k: v for k, v in environment.items() if k in AS_GIVEN})


def as_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in JSON types: a tuple becomes a list."""
    return dict(json.loads(json.dumps(settings, allow_nan=False)))


def _hashes(content: Mapping[str, Any]) -> dict[str, Any]:
    parts = {part: digest({part: value}) for part, value in content.items() if part not in ("hash", "hashes")}
    return {"hashes": parts, "hash": digest({**content, "hash": None, "hashes": parts})}


def write(run_dir: Path, manifest: Mapping[str, Any]) -> None:
    """Write run.json. After a crash the file is complete or absent. Raises UserError for a value that `read` would
    refuse, such as a path whose bytes are not UTF-8; SetupError if the disk or the folder fails."""
    if (wrong := wrong_part(manifest)) is not None:
        name, value = wrong
        texts = f"texts are UTF-8 without control characters, of at most {LONGEST} characters each"
        need = f"Give a value whose {texts}." if isinstance(value, str | list | dict) else "Give a text."
        raise UserError(f"run.json cannot hold {bare(name.split('.', 1)[-1])} {quote(value)}. {need}")
    try:
        with replacing(run_dir / NAME) as file:
            file.write(json.dumps(manifest, indent=2).encode() + b"\n")
    except OSError as error:
        raise unwritable(run_dir, error) from error


def read(run_dir: Path) -> dict[str, Any]:
    """Return the content of run.json after checking it. Raises UserError if the file is missing, was changed by hand or
    has another format, SetupError if it is damaged, a link or unreadable."""
    path = run_dir / NAME
    try:
        content = document(read_plain(path, _LARGEST))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{quote(run_dir)} has no kvbench run (no {NAME}).") from None
    except OSError as error:
        raise SetupError(f"cannot read {quote(path)} ({reason(error)}).") from error
    except ValueError:
        raise _damaged(path) from None
    if not isinstance(content, dict) or type(content.get("format")) is not int:
        raise _damaged(path)
    check_format(NAME, content["format"])
    if (wrong := wrong_part(content)) is not None:
        raise _damaged(path, f" ({bare(wrong[0])} has another type than kvbench writes)")
    _check_hashes(path, content)
    return content


def _damaged(path: Path, why: str = "") -> SetupError:
    return SetupError(f"{quote(path)} is damaged{why}. Put back a copy of it, or {NEW_RUN}.")


def _check_hashes(path: Path, content: dict[str, Any]) -> None:
    """Raise UserError if run.json was edited. The error names the edited part if the hashes show it."""
    now, stated = _hashes(content), content["hashes"]
    parts = sorted({*now["hashes"], *stated})
    edited = [quote(part) for part in parts if now["hashes"].get(part) != stated.get(part)]
    if edited:
        changed = f"{', '.join(edited)} {'differs from its hash' if len(edited) == 1 else 'differ from their hashes'}"
    elif now["hash"] != content["hash"]:
        changed = "the hash of the whole record differs"
    else:
        return
    raise UserError(f"{quote(path)} was changed by hand: {changed}. Undo the change, or {NEW_RUN}.")


def compare(info: Mapping[str, Any], config: Mapping[str, Any]) -> Differences:
    """Return the settings in which `config` differs from a run's configuration, without those in `HOST`. info: the
    content of the run's run.json."""
    # `plain` hides secrets in the stored settings again: a value that is a secret now need not have been one then.
    differing = differences(plain(info["config"]), plain(config))
    return {name: pair for name, pair in differing.items() if name not in HOST}


def check_format(file: str, format: object) -> None:
    """Raise UserError if a file has another format than this kvbench reads. format: the number in the file."""
    if format != FORMAT or isinstance(format, bool):
        raise UserError(
            f"{bare(file)} has format {bare(format)}; this kvbench reads format {FORMAT}. "
            f"Read it with the kvbench that wrote it, or {NEW_RUN}."
        )


def differences(run: Mapping[str, Any], other: Mapping[str, Any]) -> Differences:
    """Return the settings in which `run` and `other` differ. The name of a nested setting is dotted. A setting that is
    None or an empty object equals a missing setting."""
    ours, theirs = _flat(run), _flat(other)
    return {n: (ours.get(n), theirs.get(n)) for n in {**ours, **theirs} if ours.get(n) != theirs.get(n)}


def value(setting: Any) -> str:
    """Return a setting's value as text for a message, without secrets. The text for None is "default". A string gets
    quotes, a list of grids becomes words (`_grid`), and any other value becomes JSON."""
    if setting is None:
        return "default"
    if isinstance(setting, list) and setting and all(isinstance(g, dict) and "methods" in g for g in setting):
        return hide_keys("; ".join(_grid(grid) for grid in setting))
    return quote(hide_keys(setting)) if isinstance(setting, str) else json.dumps(hide_secrets(setting))


def _grid(grid: Mapping[str, Any]) -> str:
    """Return a grid as text: ``full, gkv(window=8) at 48, 25% every 16 on walk (limit 4, prompt style plain)``."""
    options = [", ".join(f"{k}={v}" for k, v in sorted(m.get("options", {}).items())) for m in grid["methods"]]
    methods = ", ".join(m["name"] + (f"({o})" if o else "") for m, o in zip(grid["methods"], options))
    budgets = ", ".join(map(str, grid.get("budgets", [])))
    intervals = ", ".join(map(str, grid.get("intervals", [])))
    own = {"limit": grid.get("limit"), "prompt style": grid.get("prompt_style")}
    notes = ", ".join(f"{name} {value}" for name, value in own.items() if value is not None)
    size = (f" at {budgets}" if budgets else "") + (f" every {intervals}" if intervals else "")
    return bare(f"{methods}{size} on {', '.join(grid.get('tasks', []))}{f' ({notes})' if notes else ''}")


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, setting in settings.items():
        if isinstance(setting, dict):
            flat.update(_flat(setting, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = setting
    return flat
