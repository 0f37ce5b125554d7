"""Reads a small file that the user names: a baseline or a policy."""

from __future__ import annotations

from pathlib import Path

from kvbench.errors import UserError, quote
from kvbench.store.files import reason


def content(path: Path, most: int) -> bytes:
    """Return the content of a file. Raises UserError if the file cannot be read, and ValueError if it has more than
    `most` bytes."""
    try:
        with open(path, "rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise UserError(f"cannot read {quote(path)} ({reason(error)}). Check its path and permissions.") from error
    if len(data) > most:
        raise ValueError(f"it is larger than {most >> 20} MiB, the most that kvbench reads")
    return data
