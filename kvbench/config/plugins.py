"""Imports methods, tasks and recipes from a user's Python file, for this process only (``--plugin FILE.py``).

The file runs once, as a module does when it is imported. It registers its methods, tasks and recipes with
``@methods.register``, ``@tasks.register`` and ``@recipes.register``. It runs with all rights of the user, who must
trust the file. Python runs exactly the bytes that were hashed, also in scoring processes: neither a compiled copy
beside the file nor a later version of the file is read.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench import registry
from kvbench.console.faults import words
from kvbench.console.signals import Signalled
from kvbench.errors import NEW_RUN, KVBenchError, PluginError, UserError, bare, quote
from kvbench.registry import NameTaken
from kvbench.scoring.worker import run_source


@dataclass(frozen=True, slots=True)
class _Plugin:
    sha256: str
    members: tuple[tuple[str, str], ...]  # kind and name of everything that it registered, such as ("method", "gkv")

    def names(self) -> list[str]:
        return list(dict.fromkeys(name for _, name in self.members))


_REGISTRIES = (registry.methods, registry.tasks, registry.recipes)
_LOADED: dict[Path, _Plugin] = {}


def load_plugin(path: str) -> list[str]:
    """Import a plug-in and return the names that it registered. A file that was imported before is not imported again.

    Raises UserError if the file cannot be read, if its import fails, or if it registers nothing. After a failed import,
    the names that the file registered are removed again.
    """
    label = f"--plugin {quote(path)}"
    file = Path(path).expanduser().resolve()
    if file in _LOADED:
        return _LOADED[file].names()
    source = _source(path)
    saved = [known.save() for known in _REGISTRIES]
    sha256 = hashlib.sha256(source).hexdigest()
    try:
        stem = re.sub(r"\W", "_", file.stem)
        _run(file, source, f"kvbench_plugin_{stem}_{sha256[:8]}", label)
        members = [
            (known.kind, name)
            for known, (before, _, _) in zip(_REGISTRIES, saved)
            for name in known.names()
            if name not in before
        ]
        if not members:
            raise UserError(
                f"{label} registers nothing; use @methods.register, @tasks.register or @recipes.register of "
                "kvbench.registry."
            )
    except BaseException:
        for known, state in zip(_REGISTRIES, saved):
            known.restore(state)
        raise
    _LOADED[file] = _Plugin(sha256, tuple(members))
    return _LOADED[file].names()


def _source(path: str) -> bytes:
    label = f"--plugin {quote(path)}"
    file = Path(path).expanduser().resolve()
    if os.path.isdir(file):
        raise UserError(f"{label} is a folder; give a Python file.")
    if file.suffix != ".py":
        raise UserError(f"{label} is no Python file; give a file whose name ends in .py.")
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{label} does not exist; give the path of a Python file.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{label} cannot be read ({getattr(error, 'strerror', None) or error}).") from None


def check_same(
    now: Sequence[Mapping[str, str]], recorded: Sequence[Mapping[str, str]], run: str, *, more: bool = False
) -> None:
    """Raise UserError if the user continues a run with other plug-in files than the run began with. The files are
    compared by content, not by path.

    now: the files that the user gives now. recorded: the files in the run's record. Both have the form that `hashed`
    returns. more: whether `now` may have files that `recorded` lacks.
    """
    was = {p["sha256"]: Path(p["path"]).name for p in recorded}
    has = {p["sha256"]: p["path"] for p in now}
    had = ", ".join(f"{name} {sha256[:12]}" for sha256, name in was.items()) or "none"
    for sha256, path in has.items():
        if sha256 not in was and not more:
            raise UserError(
                f"--plugin {quote(path)} ({sha256[:12]}) is none of the plug-ins that run {quote(run)} began with "
                f"({bare(had)}). {'Give the original file' if was else 'Leave it out'}, or {NEW_RUN}."
            )
    for sha256, name in was.items():
        if sha256 not in has:
            raise UserError(
                f"run {quote(run)} began with plug-in {quote(name)} ({bare(sha256[:12])}): give it with --plugin."
            )


def hashed(paths: Sequence[str]) -> list[dict[str, str]]:
    """Return the path and the hash of each plug-in file, without importing the files. Raises UserError if a file cannot
    be read or is no Python file."""
    return [{"path": path, "sha256": hashlib.sha256(_source(path)).hexdigest()} for path in paths]


def load_plugins(paths: Sequence[str]) -> list[str]:
    """Import several plug-ins in order, and return the names that they registered."""
    return [name for path in paths for name in load_plugin(path)]


def loaded(paths: Sequence[str]) -> list[dict[str, str]]:
    """Return the path of each plug-in file and the hash of the content that was imported. The files must be imported
    already."""
    files = [Path(path).expanduser().resolve() for path in paths]
    return [{"path": str(file), "sha256": _LOADED[file].sha256} for file in files]


def hash_of(name: str, *kinds: str) -> str | None:
    """Return the SHA-256 of the plug-in that registered `name`; None if no plug-in registered it. kinds: what the name
    may be: "method", "task" or "recipe"."""
    wanted = {(kind, name) for kind in kinds}
    return next((plugin.sha256 for plugin in _LOADED.values() if wanted & set(plugin.members)), None)


def failure(error: BaseException) -> str | None:
    """Return the beginning of a message about an exception that the code of a plug-in raised, or that passed through
    it: the file, the line and the exception. Return None for any other exception. A module of an installed package
    that registers members counts as a plug-in too."""
    if isinstance(error, PluginError):
        return str(error).rstrip(".")
    ours = sys.stdlib_module_names | {"kvbench"}
    modules = {name for known in _REGISTRIES for name in known.modules() if name.partition(".")[0] not in ours}
    frames = traceback.walk_tb(error.__traceback__)
    own = [(frame.f_code.co_filename, line) for frame, line in frames if frame.f_globals.get("__name__") in modules]
    if isinstance(error, KVBenchError) or not own:
        return None
    file, line = own[-1]
    return f"plug-in {quote(Path(file).name)}, line {line}, failed: {_kind(error)}"


def _run(file: Path, source: bytes, name: str, label: str) -> None:
    try:
        run_source(name, str(file), source)
    except (KeyboardInterrupt, Signalled):
        raise
    except BaseException as error:
        raise UserError(f"{label}{_cause(error, file)}") from error


def _cause(error: BaseException, file: Path) -> str:
    """Return one line of text that says why the import of a plug-in failed. If the error is not one of kvbench's own,
    the text also names the line of the plug-in's file at which the error occurred."""
    if isinstance(error, NameTaken):
        return f": {error} Register it under another name."
    if isinstance(error, KVBenchError):
        return f": {error}"
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return f", line {error.lineno}: not Python ({error.msg})."
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    where = f", line {lines[-1]}" if lines else ""
    return f"{where}: {_kind(error)} while the file was imported."


def _kind(error: BaseException) -> str:
    """Return an exception's class and the first line of its message, such as "ValueError (no data)"."""
    first = (words(error).splitlines() or [""])[0]
    return f"{type(error).__name__}{f' ({bare(first)})' if first else ''}"
