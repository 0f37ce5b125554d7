"""Files that are whole or absent after a kill or a power cut.

`replacing` gives a temporary file in the target's folder and puts it in the target's place once it is on disk.
`probe` finds out by writing whether a folder can be written: mode bits say nothing to root or on a read-only mount.
What a disk promises after fsync but does not keep is beyond these functions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from kvbench.errors import show

_LEFTOVER = re.compile(r"\.[\w.]+\.\d+-[0-9a-f]{8}\.tmp")


def step(name: str) -> None:
    """Does nothing; called between the steps of every multi-step write. Tests put a kill in its place."""


def bare(value: object) -> str:
    """A value escaped as by `show`, without the quotes."""
    return show(value)[1:-1]


def reason(error: OSError) -> str:
    """ "no space left on device" for an ENOSPC."""
    return (os.strerror(error.errno) if error.errno else str(error)).lower()


def sync_folder(folder: Path) -> None:
    """Make the folder's entries (new files, renames) durable."""
    if os.name == "nt":  # folders cannot be opened there
        return
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _temporary(folder: Path, stem: str) -> Path:
    return folder / f".{stem}.{os.getpid()}-{os.urandom(4).hex()}.tmp"


@contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """A new file, open for writing and reading, that takes `target`'s place unless the block raises."""
    temporary = _temporary(target.parent, target.name)
    try:
        with open(temporary, "x+b") as file:
            step(f"{target.name} opened")
            yield file
            file.flush()
            os.fsync(file.fileno())
        step(f"{target.name} written")
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    step(f"{target.name} replaced")
    sync_folder(target.parent)


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files that a killed process left. Call it only under the run's lock."""
    for path in folder.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            path.unlink(missing_ok=True)


def is_leftover(name: str) -> bool:
    return _LEFTOVER.fullmatch(name) is not None


def probe(folder: Path) -> None:
    """Write and remove a small file in `folder`. Raises OSError when that fails."""
    path = _temporary(folder, "probe")
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, b"kvbench")
    finally:
        os.close(fd)
        path.unlink(missing_ok=True)
