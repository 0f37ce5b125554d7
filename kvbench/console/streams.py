"""Makes the standard streams safe to print to if they are closed or cannot be written.

If one of the descriptors 0 to 2 is closed, `repair` opens the null device on it. Otherwise the next file that the
process opens would get this descriptor, and a library's output would end up in that file. A failed write to standard
output makes the command fail. Every write fails if standard output was closed when the command started. If standard
output is a pipe whose reader has ended, as in ``| head``, the command ends early without a message and without failing.
A failed write to standard error is ignored, because the run matters more than its messages.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO

from kvbench.errors import SetupError


class Unprintable(SetupError):
    """The error for standard output that cannot be written."""


def repair() -> None:
    """Make the standard streams safe to print to, as the module's docstring describes it.

    From now on, a failed write to stdout raises `Unprintable`, or BrokenPipeError if stdout is a pipe without a reader.
    Streams that other code has replaced, such as pytest's, are not changed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the system gives it the lowest free descriptor, which is this one
            _Output.is_lost |= number == 1
    if sys.stdout is sys.__stdout__:
        sys.stdout = _opened(1, sys.stdout, _Output)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _opened(2, sys.stderr, _Messages)


def discard_output() -> None:
    """Discard the output that is still buffered, so that the interpreter can end without an error."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
    _Output.is_lost = False


class _Output(io.FileIO):
    is_lost = False  # whether the caller closed standard output, so that output would reach only the null device

    def write(self, data: object) -> int | None:  # type: ignore[override]
        if _Output.is_lost:
            raise Unprintable("cannot write to standard output (it is closed). Redirect it, for example to /dev/null.")
        try:
            return super().write(data)  # type: ignore[arg-type]
        except BrokenPipeError:
            raise
        except OSError as error:
            why = os.strerror(error.errno).lower() if error.errno else str(error)
            raise Unprintable(f"cannot write to standard output ({why}). Redirect it elsewhere.") from None


class _Messages(io.FileIO):
    def write(self, data: object) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)  # type: ignore[arg-type]
        except OSError:
            return memoryview(data).nbytes  # type: ignore[arg-type]


def _opened(number: int, before: TextIO | None, kind: type[io.FileIO]) -> TextIO:
    """Return a new text stream that writes to the descriptor `number`. before: the stream that the new stream replaces,
    and whose encoding it takes."""
    if before is not None:
        before.flush()
    raw = kind(number, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(before, "encoding", None),
        errors="backslashreplace",
        line_buffering=number == 2 or raw.isatty(),
    )
