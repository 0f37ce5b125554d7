"""Methods and tasks from a Python file of one's own, for this process only (``--plugin FILE.py``).

    load_plugin("mine.py")      # ["mymethod"]: what the file registered
    loaded()                    # [{"path": ..., "sha256": ...}], for a run's record

The file is imported like any module and registers with ``@methods.register`` or ``@tasks.register``. It runs with all
rights of the user: give only files that you trust.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench import registry
from kvbench.errors import KVBenchError, UserError, show
from kvbench.registry import NameTaken


@dataclass(frozen=True, slots=True)
class _Plugin:
    path: Path
    sha256: str
    names: tuple[str, ...]


_LOADED: dict[Path, _Plugin] = {}


def load_plugin(path: str) -> list[str]:
    """Import a file once and return the names it registered. Raises UserError; nothing of the file stays registered."""
    label = f"--plugin {show(path)}"
    file = Path(path).expanduser().resolve()
    if file in _LOADED:
        return list(_LOADED[file].names)
    if os.path.isdir(file):
        raise UserError(f"{label} is a folder; give a Python file.")
    if file.suffix != ".py":
        raise UserError(f"{label} is no Python file; its name must end in .py.")
    try:
        source = file.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{label} does not exist; give the path of a Python file.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{label} cannot be read ({getattr(error, 'strerror', None) or error}).") from None
    saved = registry.methods.save(), registry.tasks.save()
    sha256 = hashlib.sha256(source).hexdigest()
    try:
        stem = re.sub(r"\W", "_", file.stem)
        _run(file, f"kvbench_plugin_{stem}_{sha256[:8]}", label)
        names = [
            name
            for known, (members, _, _) in zip((registry.methods, registry.tasks), saved)
            for name in known.names()
            if name not in members
        ]
        if not names:
            raise UserError(f"{label} registers nothing; use @methods.register or @tasks.register of kvbench.registry.")
    except BaseException:
        for known, before in zip((registry.methods, registry.tasks), saved):
            known.restore(before)
        raise
    _LOADED[file] = _Plugin(file, sha256, tuple(names))
    return names


def load_plugins(paths: Sequence[str]) -> list[str]:
    """Every file in its order."""
    return [name for path in paths for name in load_plugin(path)]


def loaded(paths: Sequence[str]) -> list[dict[str, str]]:
    """Path and hash of loaded files, as they were when they were imported."""
    found = [_LOADED[Path(path).expanduser().resolve()] for path in paths]
    return [{"path": str(plugin.path), "sha256": plugin.sha256} for plugin in found]


def hash_of(name: str) -> str | None:
    """SHA-256 of the file that registered a method or task; None when no plug-in did."""
    return next((plugin.sha256 for plugin in _LOADED.values() if name in plugin.names), None)


def _run(file: Path, name: str, label: str) -> None:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"{label} cannot be imported.")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up by name
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # a user's folder stays as it is
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(name, None)
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UserError(f"{label}{_cause(error, file)}") from error
    finally:
        sys.dont_write_bytecode = written


def _cause(error: BaseException, file: Path) -> str:
    """Why an import failed, with the line of the file, in one line."""
    if isinstance(error, NameTaken):
        return f": {error} Register it under another name."
    if isinstance(error, KVBenchError):
        return f": {error}"
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f", line {error.lineno}: not Python ({error.msg})."
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    where = f", line {lines[-1]}" if lines else ""
    first = (str(error).splitlines() or [""])[0]
    return f"{where}: {type(error).__name__}{f' ({show(first)[1:-1]})' if first else ''} while it was imported."
