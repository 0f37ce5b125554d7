"""Reads and writes the files of a run's folder safely.

Only regular files and folders are opened, because a folder from someone else may hold a link to a file outside the
folder, or a pipe that never ends. These functions cannot help against a disk that loses data after fsync.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from kvbench.errors import SetupError, quote

_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFREG: "a file",
}
_REMEDIES = {
    "free space": (errno.ENOSPC,),
    "free space or ask for a larger quota": (errno.EDQUOT,),
    "raise the limit on file sizes (ulimit -f)": (errno.EFBIG,),
    "see that the network disk is mounted and answers": (
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ENOTCONN,
        errno.EHOSTDOWN,
    ),
    "see that the folder can be written": (errno.EROFS, errno.EACCES, errno.EPERM),
    "raise the limit on open files (ulimit -n)": (errno.EMFILE, errno.ENFILE),
}
_AS_IT_IS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
_LEFTOVER = re.compile(r"\.[\w.]+\.\d+-[0-9a-f]{8}\.tmp")


def crash_point(name: str) -> None:
    """Do nothing. A call marks a moment at which a crash must be harmless; tests replace this function to kill the
    process there."""


def reason(error: OSError) -> str:
    """Return the system's message in lower case: "no space left on device" for ENOSPC."""
    return (os.strerror(error.errno) if error.errno else str(error)).lower()


def remedy(error: OSError) -> str:
    """Return what the user should do before another attempt, as a clause without a full stop, such as "free space"."""
    return next((text for text, numbers in _REMEDIES.items() if error.errno in numbers), "check the disk")


def unwritable(folder: Path, error: OSError) -> SetupError:
    """Return the error of a command that ends before any work, because it cannot write in a folder."""
    return SetupError(f"cannot write in {quote(folder)} ({reason(error)}). Nothing was run. Fix: {remedy(error)}.")


def cure(error: OSError, damaged: str) -> str:
    """Return the sentence that tells the user what to do about a file that cannot be read. damaged: the sentence for a
    damaged file. The function returns it, except if kvbench lacks the permission to read the file."""
    return "Check its permissions." if isinstance(error, PermissionError) else damaged


def sync_folder(folder: Path) -> None:
    """Sync the folder to disk, so that its new and renamed files survive a power cut."""
    if os.name == "nt":  # folders cannot be opened there
        return
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_plain(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file and return its descriptor. flags: as for `os.open`. Raises SetupError for a link, a folder, a
    pipe or a device, OSError if the file cannot be opened."""
    _must_be(path, os.lstat(path), stat.S_IFREG)  # checked before opening, which may have an effect on a device
    fd = os.open(path, flags | _AS_IT_IS | os.O_CLOEXEC)
    try:
        _must_be(path, os.fstat(fd), stat.S_IFREG)
    except SetupError:
        os.close(fd)
        raise
    return fd


def read_plain(path: Path, limit: int) -> bytes:
    """Return all bytes of a regular file. Raises like `open_plain`, and SetupError for more than `limit` bytes."""
    with open(open_plain(path), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise SetupError(
            f"{quote(path)} is larger than {limit >> 20} MiB, the most that kvbench writes. Put back the original file."
        )
    return data


def plain_size(path: Path) -> int:
    """Return the size of a regular file in bytes. Raises SetupError if `path` is not a regular file, OSError if
    it does not exist."""
    status = os.lstat(path)
    _must_be(path, status, stat.S_IFREG)
    return status.st_size


def own_folder(path: Path) -> bool:
    """Return whether there is a folder at this path. Raises SetupError if there is a link or a file instead."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    _must_be(path, status, stat.S_IFDIR)
    return True


def _must_be(path: Path, status: os.stat_result, wanted: int) -> None:
    if (kind := stat.S_IFMT(status.st_mode)) != wanted:
        raise SetupError(
            f"{quote(path)} is {_KINDS.get(kind, 'a device')}, where a run needs {_KINDS[wanted]}. "
            "kvbench does not use it. Remove it, or put the original back in its place."
        )


@contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """Yield a new file, open for writing and reading. When the `with` statement ends, the file replaces `target`; after
    an exception, it is deleted instead.

    After a kill or a power cut, `target` is either as before or the complete new file. If `target` is a link, the link
    is replaced, and the file behind the link stays unchanged.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        with open(temporary, "x+b") as file:
            crash_point(f"{target.name} opened")
            yield file
            file.flush()
            os.fsync(file.fileno())
        crash_point(f"{target.name} written")
        os.replace(temporary, target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    crash_point(f"{target.name} replaced")
    sync_folder(target.parent)


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files that a killed process left. The caller must hold the run's lock."""
    for path in folder.iterdir():
        if _LEFTOVER.fullmatch(path.name) and stat.S_ISREG(os.lstat(path).st_mode):
            path.unlink(missing_ok=True)


def is_leftover(name: str) -> bool:
    return _LEFTOVER.fullmatch(name) is not None


def probe(folder: Path) -> None:
    """Write a temporary file into `folder` as a test; mode bits mean nothing to root or on a read-only mount. Raises
    OSError if the folder is not writable."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"kvbench")
