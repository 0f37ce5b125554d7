"""Errors that reach the user, each with its exit code, and helpers that build their messages.

A message is one line: it states the problem, quotes the offending value with `quote`, and says what to do. The command
line prints ``error: <message>``; for `Interrupted` it prints the message alone. Any other exception is a bug (exit code
1).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

NEW_RUN = "start a new run (kvbench run --run-name)"  # names the command, because most commands lack this option


class KVBenchError(Exception):
    """Base class of all expected failures. `str(error)` is the text to print."""

    exit_code = 1


class UserError(KVBenchError):
    """Wrong usage or input; kvbench finds most such errors before any work."""

    exit_code = 2


class SetupError(KVBenchError):
    """The model, hub, disk, device or sandbox failed or cannot be used."""

    exit_code = 3


class IncompleteError(KVBenchError):
    """A run is not finished, or some of its rows are missing, have failed or have no score."""

    exit_code = 4


class RunInUseError(KVBenchError):
    """Another process writes to the same run."""

    exit_code = 6


class Interrupted(KVBenchError):
    """The command was stopped by Ctrl-C (exit code 130), SIGTERM (143) or SIGHUP (129); the message says how to
    continue."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class PluginError(KVBenchError):
    """The code of a plug-in failed, or a method broke a rule of its interface."""

    exit_code = 2


class BudgetViolation(KVBenchError):
    """A rule of fair comparison was broken, so the results are not comparable with others.

    For example, a method kept more entries than its budget, dropped protected entries, or returned NaN scores.
    """


def quote(value: object) -> str:
    """Quote a value for a message: its first 200 characters, with control characters escaped (\\x1b)."""
    return f"'{bare(value)}'"


def bare(value: object) -> str:
    """Escape and shorten a value as `quote` does, but add no quotes."""
    text = str(value)
    return "".join(map(_escape, text[:200])) + ("..." if len(text) > 200 else "")


def shown(value: object) -> str:
    """Return a setting's value in the form that messages show; None becomes "none"."""
    return "none" if value is None else str(value)


def few(words: Sequence[str], most: int) -> str:
    """Return the first `most` texts, joined by commas, and the number of the others: "a, b and 3 more"."""
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def joined(words: Sequence[str], last: str) -> str:
    """Join texts by commas, but put the word `last` before the last text: "a, b or c"."""
    return f"{', '.join(words[:-1])} {last} {words[-1]}" if len(words) > 1 else words[0]


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: "1 row", "2 rows"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _escape(character: str) -> str:
    code = ord(character)
    noncharacter = code & 0xFFFE == 0xFFFE or 0xFDD0 <= code <= 0xFDEF  # no XML may hold it
    if noncharacter or unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    return character
