"""A temporary file that keeps the token ids, texts and documents of a run's prompts out of memory until they are
needed.

In a run with long contexts the prompts take gigabytes. The file has no name (it is unlinked when it is made), so
nothing is left behind even after kill -9. It lies in the folder for temporary files (TMPDIR).
"""

from __future__ import annotations

import os
import pickle
import tempfile
import weakref
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, overload

from kvbench.errors import SetupError, UserError, quote
from kvbench.store.files import reason, remedy

T = TypeVar("T")


class Spool:
    """Stores objects in a temporary file, and returns for each object a handle that reads it back.

    The file stays open as long as the spool or one of its handles exists.
    """

    def __init__(self) -> None:
        self._end = 0  # bytes
        self._fd = _unnamed_file()
        weakref.finalize(self, os.close, self._fd)

    def ids(self, ids: Sequence[int]) -> StoredIds:
        """Store token ids in 4 bytes each. Raises SetupError if the disk fails."""
        return StoredIds(self, self._append(array("i", ids).tobytes()), len(ids))

    def put(self, what: T, name: str) -> Stored[T]:
        """Store an object. name: what messages call the object. Raises UserError if `pickle` cannot store the object,
        SetupError if the disk fails."""
        try:
            data = pickle.dumps(what, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise UserError(
                f"{name} cannot be stored with pickle ({error}). Build it from texts, numbers, lists and dictionaries."
            ) from error
        return Stored(self, self._append(data), len(data))

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`. Raises SetupError if the disk fails."""
        data = b""
        try:
            while len(data) < length and (part := os.pread(self._fd, length - len(data), offset + len(data))):
                data += part
        except OSError as error:
            raise _failed(error) from error
        return data

    def _append(self, data: bytes) -> int:
        """Write `data` at the end of the file, and return the offset at which they begin."""
        begin, left = self._end, memoryview(data)
        try:
            while left:
                written = os.pwrite(self._fd, left, self._end)
                self._end, left = self._end + written, left[written:]
        except OSError as error:
            raise _failed(error) from error
        return begin


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class StoredIds(Sequence[int]):
    """Token ids in a spool. They compare, hash and print like the tuple of the ids.

    Every access except `len(ids)` reads all ids from the file, also an access to one id. To look up several ids, make
    `tuple(ids)` first.
    """

    spool: Spool
    offset: int  # bytes
    length: int

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(self._read())

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, tuple | StoredIds) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        ids = self._read()
        return tuple(ids[index]) if isinstance(index, slice) else ids[index]

    def _read(self) -> array[int]:
        ids = array("i")
        ids.frombytes(self.spool.read(self.offset, self.length * ids.itemsize))
        return ids


@dataclass(frozen=True, slots=True, eq=False)
class Stored(Generic[T]):
    """A reference to an object that a spool holds in its file."""

    spool: Spool
    offset: int
    length: int

    def read(self) -> T:
        """Return a copy of the object, made anew by each call."""
        what: T = pickle.loads(self.spool.read(self.offset, self.length))
        return what


def _unnamed_file() -> int:
    """Make a temporary file without a name, and return its descriptor. Raises SetupError if the file cannot be made."""
    try:
        with tempfile.TemporaryFile(prefix="kvbench-") as file:
            return os.dup(file.fileno())
    except OSError as error:
        raise _failed(error) from error


def _failed(error: OSError) -> SetupError:
    return SetupError(
        f"cannot store the run's prompts in {quote(tempfile.tempdir or 'TMPDIR')} ({reason(error)}). "
        f"{remedy(error).capitalize()}, or set the variable TMPDIR to another folder."
    )
