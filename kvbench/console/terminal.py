"""Prints to the user: tables and JSON on stdout, messages on stderr; plain ASCII on terminals without UTF-8.

Callers escape text from outside kvbench (answers, file names) with `clean` or `kvbench.errors.quote` before they print
the text on stdout. The functions for stderr escape their text themselves and hide passwords and access keys in it. In
notes and warnings, they also hide the value of every ``name=value`` whose name announces a secret. Errors keep such
values, because errors show commands for the user to type. If an error quotes another library's message, `faults.words`
has hidden the values in the quotation.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kvbench.console import streams
from kvbench.errors import Interrupted, KVBenchError, bare

if TYPE_CHECKING:
    from rich.console import Console

    from kvbench.console.grid import Grid

NARROW = 60  # least characters per line of a table, because narrower tables are unreadable
WIDE = 100  # characters per line if stdout is no terminal and COLUMNS is not set


def prepare() -> None:
    """Repair the standard streams (`streams.repair`), and let them escape characters that the locale cannot print."""
    streams.repair()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def note(text: str) -> None:
    _tell("note: ", text)


def warning(text: str) -> None:
    _tell("warning: ", text)


def fail(error: KVBenchError) -> None:
    """Print every line of an error's message on stderr. Each line begins with "error: ", unless the command was
    interrupted."""
    prefix = "" if isinstance(error, Interrupted) else "error: "
    for line in str(error).split("\n"):
        print(f"{prefix}{clean(_redact().hide_keys(line))}", file=sys.stderr, flush=True)


def _tell(kind: str, text: str) -> None:
    print(f"{kind}{clean(_redact().redact_keys(text))}", file=sys.stderr, flush=True)


def _redact() -> ModuleType:
    """Return the module `redact`. It is imported only when the first message needs it, so that commands start fast."""
    from kvbench.console import redact

    return redact


def clean(text: str) -> str:
    """Return a text of unknown origin as one line that is safe to print: line ends, control characters and
    text-direction characters are escaped."""
    return "".join(bare(text[i : i + 200]) for i in range(0, len(text), 200))


def ascii_only() -> bool:
    """Return whether tables must use ASCII only: stdout's encoding is not UTF-8, or the locale is C or POSIX."""
    encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower().replace("-", "")
    locale = os.environ.get("LC_ALL") or os.environ.get("LANG") or ""
    return encoding != "utf8" or locale in ("C", "POSIX")


def console() -> Console:
    """Return a rich console that prints on stdout. If stdout is a closed pipe, printing raises BrokenPipeError."""
    from rich.console import Console

    class Quiet(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

        def print(self, *objects: Any, **how: Any) -> None:  # a table that does not fit is wider, not cut off
            super().print(*objects, **{"crop": False, **how})

    width = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else WIDE
    made = Quiet(file=sys.stdout, width=width, highlight=False, emoji=False, markup=False)
    made.width = max(NARROW, made.width)
    return made


def grid(*columns: str, right: tuple[str, ...] = (), whole: tuple[str, ...] = ()) -> Grid:
    """Return an empty table with kvbench's layout. right: columns aligned at the right. whole: columns whose text is
    never broken into several lines."""
    from kvbench.console.grid import Grid

    made = Grid("-" if ascii_only() else "─")
    for column in columns:
        made.add_column(column, right=column in right, whole=column in whole)
    return made


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, right: tuple[str, ...] = ()) -> None:
    """Print a table on stdout. columns: the column titles. right: the titles of columns that are aligned at the
    right."""
    filled = grid(*columns, right=right)
    for row in rows:
        filled.add_row(*row)
    console().print(filled)


def data(document: Any) -> None:
    """Print one JSON document on stdout, in one line. Callers print nothing on stdout afterwards."""
    print(json.dumps(document, ensure_ascii=True, allow_nan=False), flush=True)
