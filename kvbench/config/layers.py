"""Gathers settings from a suite, a config file, environment variables and flags; later sources override earlier ones.

A config file and a suite have the same format. Settings stand at the top level or under ``[run]``; they are named like
the flags, with ``_`` for ``-``. Any number of ``[[grid]]`` blocks may follow, each with its own `method`, `budget`,
`protect`, `interval`, `task`, `limit` and `prompt_style`. `kvbench.config.parsers` parses the values; the run command
checks whether the values fit together. A table ``[about]`` describes a suite for users; it has no effect on a run.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.config.parsers import unknown_key
from kvbench.config.settings import PARSERS, PER_TASK
from kvbench.errors import UserError, quote
from kvbench.registry import did_you_mean, near

AXES = ("method", "budget", "task")
BLOCK = (*AXES, "protect", "interval", *PER_TASK)
KEYS = (*AXES, "method_opt", "protect", *PARSERS)
# Keys of ``[about]``. A suite has either `what` (its description) or, if it repeats a table of a paper, the other keys:
# the table, what is the same as in the paper, what differs, and what the suite needs.
ABOUT = ("what", "table", "same", "differs", "needs")
SUITES = Path(__file__).parent / "suites"
PREFIX = "KVBENCH_"
FLAG_ONLY = ("unsafe_run_code",)  # a file or a variable, which may be from somebody else, must not switch it on
ELSEWHERE = ("KVBENCH_DATA", "KVBENCH_NO_PROGRESS")  # variables that are not settings of a run


@dataclass(frozen=True, slots=True)
class Given:
    """A value of a setting, and its source as messages name it: ``--seed``, ``c.toml:12: 'seed'``."""

    value: Any
    source: str


Layer = dict[str, Given]


@dataclass(slots=True)
class Gathered:
    """Settings from all sources. Flags override variables, variables override files, and the config file overrides the
    suite.

    files: the settings of the suite, then those of the config file; a file that the user did not name is left out.
    blocks: the ``[[grid]]`` blocks of the config file or, if the config file has no such block, of the suite. above:
    the settings of the files that override the blocks.
    """

    files: list[Layer]
    variables: Layer
    flags: Layer
    blocks: list[Layer] = field(default_factory=list)
    above: list[Layer] = field(default_factory=list)

    def first(self, key: str) -> Given | None:
        """Return the value of a setting from the source of highest precedence. None if no source states a value outside
        ``[[grid]]`` blocks."""
        return self.typed(key) or next((layer[key] for layer in reversed(self.files) if key in layer), None)

    def over_blocks(self, key: str) -> Given | None:
        """Return the value of a setting from the source of highest precedence among those that override the blocks:
        flag, environment variable, and the config file if the blocks are the suite's. None if none states a value."""
        return self.typed(key) or next((layer[key] for layer in reversed(self.above) if key in layer), None)

    def typed(self, key: str) -> Given | None:
        """Return the value of a setting from its flag or, if the flag is not given, from its environment variable. None
        if neither is given."""
        return self.flags.get(key) or self.variables.get(key)

    def record(self) -> dict[str, list[dict[str, Any]]]:
        """Return, for each setting, all values given outside ``[[grid]]`` blocks, with their sources. Overridden values
        come before those that override them. The form is {setting: [{"source", "value"}, ...]}."""
        seen: dict[str, list[dict[str, Any]]] = {}
        for layer in (*self.files, self.variables, self.flags):
            for key, given in layer.items():
                source = given.source.removesuffix(f": {quote(key)}")
                seen.setdefault(key, []).append({"source": source, "value": given.value})
        return seen


def gather(
    flags: Mapping[str, Any], environ: Mapping[str, str], suite: str | None = None, config: str | Path | None = None
) -> Gathered:
    """Return the settings from suite, config file, environment variables and flags.

    flags: {name of a setting: the value of its flag}. If a flag has another name than its setting, the value is a
    `Given` that names the flag. None and empty lists mean that the user did not give the flag. Flags that belong to no
    setting are ignored. Raises UserError for an unknown suite, and for a file that is no valid TOML file of settings.
    """
    files = [read(suite_path(suite), "--suite")] if suite else []
    if config:
        if Path(config).suffix.lower() != ".toml":
            raise UserError(f"--config {quote(config)}: config files are TOML. Give a file NAME.toml.")
        files.append(read(Path(config), "--config"))
    typed = {
        key: value if isinstance(value, Given) else Given(value, "--" + key.replace("_", "-"))
        for key, value in flags.items()
        if key in KEYS and value not in (None, (), [])
    }
    names = {k: PREFIX + k.upper() for k in KEYS if k not in ("data", *FLAG_ONLY)}  # `sources.data` reads KVBENCH_DATA
    variables = {k: Given(environ[n], f"environment variable {n}") for k, n in names.items() if environ.get(n)}
    layers, grids = [layer for layer, _ in files], [blocks for _, blocks in files]
    last = max((number for number, blocks in enumerate(grids) if blocks), default=-1)
    return Gathered(layers, variables, typed, grids[last] if last >= 0 else [], layers[last + 1 :])


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a warning for each environment variable KVBENCH_... that has no effect, because kvbench does not know its
    name or takes its setting only from a flag (`FLAG_ONLY`)."""
    words = {key.lower(): PREFIX + key.upper() for key in (*KEYS, *(n.removeprefix(PREFIX) for n in ELSEWHERE))}
    sentences = [
        f"environment variable {PREFIX + key.upper()} has no effect; only the flag has."
        for key in FLAG_ONLY
        if PREFIX + key.upper() in environ
    ]
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in words.values():
            close = near(name.removeprefix(PREFIX), list(words), 1)
            hint = f" Did you mean {words[close[0]]}?" if close else ""
            sentences.append(f"environment variable {name} is not known and has no effect.{hint}")
    return sentences


def suites() -> dict[str, Path]:
    """Return the files of the suites that ship with kvbench, by name."""
    return {path.stem: path for path in sorted(SUITES.glob("*.toml"))}


def about(name: str) -> dict[str, str]:
    """Return the table ``[about]`` of a suite that ships with kvbench."""
    return dict(tomllib.loads(suites()[name].read_text(encoding="utf-8"))["about"])


def suite_path(name: str) -> Path:
    """Return the path of a suite's file. name: the name of a suite that ships with kvbench, or the path of a TOML
    file. Raises UserError for any other name."""
    shipped = suites()
    if name.strip().lower() in shipped:
        return shipped[name.strip().lower()]
    if name.endswith(".toml") or "/" in name:
        return Path(name)
    raise UserError(f"unknown suite {quote(name)}.{did_you_mean(name, list(shipped))} Known: {', '.join(shipped)}.")


def read(path: Path, option: str) -> tuple[Layer, list[Layer]]:
    """Return the settings and the ``[[grid]]`` blocks of a TOML file. The source of each value states its line in the
    file. Raises UserError if the file cannot be read, is no valid TOML file of settings, or has unknown keys.

    option: the flag with which the user named the file, for messages.
    """
    if os.path.isdir(path):
        raise UserError(f"{option}: {quote(path)} is a folder. Give a TOML file.")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{option}: there is no file {quote(path)}. Check the path.") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path.name} is not UTF-8 (byte 0x{error.object[error.start]:02x} at offset {error.start}). "
            "Save it as UTF-8."
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{option}: cannot read {quote(path)} ({getattr(error, 'strerror', None) or error}).") from None
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"line (\d+)", str(error))
        raise UserError(f"{path.name}:{line[1] if line else text.count(chr(10)) + 1}: not TOML ({error}).") from None
    where = _Lines(path.name, text)
    run, blocks = document.pop("run", {}), document.pop("grid", [])
    if not isinstance(run, dict) or not isinstance(blocks, list) or not all(isinstance(b, dict) for b in blocks):
        raise UserError(f"{path.name}: [run] must be a table of settings and [[grid]] a list of tables.")
    if not isinstance(about := document.pop("about", {}), dict):
        raise UserError(f"{path.name}: [about] must be a table of texts.")
    where.layer(about, "about", 1, ABOUT)
    layer = where.layer(document, "", 0, (*KEYS, "run", "grid")) | where.layer(run, "run", 1, KEYS)
    return layer, [where.layer(block, "grid", i, BLOCK) for i, block in enumerate(blocks, 1)]


class _Lines:
    """Finds the line of each key in a TOML file, because tomllib does not report lines. A key that is not found, as in
    an inline table, gets line 1."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self._at: dict[tuple[str, int, str], int] = {}
        table, counts = ("", 0), {"": 0}
        for number, line in enumerate(text.splitlines(), 1):
            if header := re.match(r"\s*\[\[?\s*([\w.-]+)\s*\]\]?", line):
                counts[header[1]] = counts.get(header[1], 0) + 1
                table = (header[1], counts[header[1]])
                self._at.setdefault(("", 0, header[1]), number)
            elif key := re.match(r"""\s*["']?([\w.-]+)["']?\s*=""", line):
                self._at.setdefault((*table, key[1]), number)

    def layer(self, table: Mapping[str, Any], header: str, index: int, known: tuple[str, ...]) -> Layer:
        layer: Layer = {}
        for key, value in table.items():
            line = self._at.get((header, index, key), 1)
            if key in FLAG_ONLY:
                raise UserError(f"{self.name}:{line}: {quote(key)} is refused in files. Give the flag instead.")
            if key not in known:
                raise UserError(f"{self.name}:{line}: {unknown_key(key, known)}")
            layer[key] = Given(value, f"{self.name}:{line}: {quote(key)}")
        return layer
