"""Collects the independent problems of one command, so that the user sees all of them at once.

Only expected errors (`KVBenchError`) are collected. Any other exception is a bug and ends the command at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvbench.console import terminal
from kvbench.errors import KVBenchError


class Several(KVBenchError):
    """Several errors as one error, whose message has a line per error.

    Its exit code is the smallest exit code of these errors, so that a usage error (2) takes precedence over a setup
    error (3).
    """

    def __init__(self, errors: list[KVBenchError]) -> None:
        super().__init__("\n".join(dict.fromkeys(str(error) for error in errors)))
        self.exit_code = min(error.exit_code for error in errors)


class Problems:
    def __init__(self) -> None:
        self.errors: list[KVBenchError] = []
        self.warnings: list[str] = []

    @contextmanager
    def collect(self) -> Iterator[None]:
        """If the body of the ``with`` statement raises a KVBenchError, collect it and continue after the body."""
        try:
            yield
        except KVBenchError as error:
            self.errors.append(error)

    def warn(self, text: str) -> None:
        """Collect a warning. `stop` prints equal warnings once."""
        if text not in self.warnings:
            self.warnings.append(text)

    def stop(self) -> None:
        """Print the collected warnings. Then, if errors were collected, raise all of them as one error."""
        for text in self.warnings:
            terminal.warning(text)
        self.warnings.clear()
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise Several(self.errors)
