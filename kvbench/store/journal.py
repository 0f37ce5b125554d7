"""Writes the journal of a run: it appends rows one by one, and reports the key of each row once the row is safe on
disk.

A row becomes a record ``crc32 SPACE json LF``, written with one write(). Every process writes a new file of its own, a
segment, and never continues an older segment. A kill can cut a record in the middle; in a continued segment, the next
record would follow the torn record on the same line. A row counts as safe only after fdatasync, which runs in a thread
while generation goes on. The row's key is therefore often reported by a later call than the call that wrote the row.
Only one thread may write to a journal.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from kvbench.console import signals
from kvbench.console.redact import redact_keys
from kvbench.errors import SetupError, quote
from kvbench.store.again import resume_command
from kvbench.store.commit import Commit
from kvbench.store.files import crash_point, own_folder, reason, remedy, sync_folder
from kvbench.store.host import boot_id, host_name
from kvbench.store.schema import check_row, clean_text

FOLDER = "journal"
SUFFIX = ".jsonl"
COMMIT_SECONDS = 2.0
SLOW_SECONDS = 2.0  # the user is warned of a commit that takes longer
PATIENCE_SECONDS = 0.1  # how long `append` and `poll` wait for a commit

_datasync = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync


def encode(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line of the journal, with its checksum."""
    payload = json.dumps(record, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    return b"%08x %s\n" % (zlib.crc32(payload), payload)


class Journal:
    """Appends rows to a new segment of the run's journal.

    `rows_before`: the number of finished rows in earlier segments; error messages state the sum of this number and the
    rows saved by this object. None: error messages state no number, because other processes save rows, too. `again`:
    how error messages tell the user to go on, such as "join again"; None: with `kvbench run --resume`.
    """

    def __init__(self, run_dir: Path, *, rows_before: int | None = 0, again: str | None = None) -> None:
        self.run_dir = run_dir
        self.segment: Path | None = None  # made with the first row, so that an idle writer leaves no file
        self.saved = 0  # rows that this object has reported as safe
        self.slowest_flush = 0.0  # seconds
        self._rows_before = rows_before
        self._again = again
        self._fd = -1
        self._end = 0  # bytes of the complete records in the segment
        self._waiting: list[str] = []  # keys of the rows written since the last commit began
        self._commit: Commit | None = None  # the commit under way
        self._last_commit = -COMMIT_SECONDS
        self._pid = os.getpid()
        self.failed = False  # whether it refuses further rows

    def append(
        self,
        row: Mapping[str, object],
        *,
        prompt: str | None = None,
        output: str | None = None,
        turns: Sequence[str] = (),
    ) -> list[str]:
        """Write one row with its texts. Return the keys of the rows that are safe on disk, without the keys that an
        earlier call returned. The key of this row is often returned only by a later call.

        turns: the answers of all turns, if there are several; `output` is the last of them. Raises ValueError if the
        row does not fit the schema. Raises SetupError if the disk or the folder fails; later calls of this
        method then raise RuntimeError, as they do after `close`.
        """
        several = json.dumps([clean_text(turn) for turn in turns]) if len(turns) > 1 else None
        text = {"prompt": prompt, "output": output}
        text = {name: None if value is None else clean_text(value) for name, value in text.items()} | {"turns": several}
        hashes = {f"{n}_sha256": _sha256(v) for n in ("prompt", "output") if (v := text[n]) is not None}
        checked = check_row({**hashes, **row})
        return self.copy(checked["row_key"], encode({"kind": "row", "row": checked, "text": text}))

    def copy(self, key: str, record: bytes) -> list[str]:
        """Write a record of another journal unchanged; return keys and raise SetupError as `append` does. key: the key
        of the record's row."""
        if self.failed or os.getpid() != self._pid:
            raise RuntimeError("this journal has failed or was closed, or belongs to another process")
        self._write(record)
        self._waiting.append(key)
        return self.poll()

    def poll(self) -> list[str]:
        """Begin a commit (a sync of the written rows to disk) if one is due. Return the keys of the rows that are safe
        on disk, without the keys that an earlier call returned.

        A commit is due if rows wait for it, no other commit is under way, and the last commit ended at least two
        seconds ago. Waits at most `PATIENCE_SECONDS` for the disk.
        """
        saved = self._collect(0.0)
        if self._commit is None and self._waiting and time.monotonic() - self._last_commit >= COMMIT_SECONDS:
            self._begin()
            saved += self._collect(PATIENCE_SECONDS)
        return saved

    def flush(self) -> list[str]:
        """Wait until all written rows are safe on disk. Return their keys, without the keys that an earlier call
        returned."""
        saved = self._collect(None)
        if self._waiting:
            self._begin()
            saved += self._collect(None)
        return saved

    def close(self) -> None:
        """Commit the written rows and close the segment; no more rows can be written. Warn if a commit was slow."""
        try:
            if not self.failed and os.getpid() == self._pid:
                self.flush()
        finally:
            if self._fd >= 0:
                os.close(self._fd)
                if self.slowest_flush > SLOW_SECONDS:
                    slow = (
                        f"writing to {quote(self.run_dir)} is slow: a commit took {self.slowest_flush:.1f} s. "
                        "No row is lost; a folder on a local disk (--out) is faster."
                    )
                    print(f"warning: {redact_keys(slow)}", file=sys.stderr, flush=True)
            self._fd, self.failed = -1, True

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _begin(self) -> None:
        fd = self._fd  # the sync may still run after a failed journal has closed its descriptor
        with signals.shield():
            self._commit, self._waiting = Commit(lambda: _datasync(fd), self._waiting), []

    def _collect(self, patience: float | None) -> list[str]:
        """Wait up to `patience` seconds for the commit under way (None: without limit). Return the keys of its rows if
        it has ended, otherwise []."""
        if self._commit is None:
            return []
        try:
            if not self._commit.ended(patience):
                return []
        except Exception as error:  # the page cache may have dropped rows: never trust another sync
            self._fail(error if isinstance(error, OSError) else OSError(str(error) or type(error).__name__))
        self._check_place()
        with signals.shield():
            commit, self._commit = self._commit, None
            self._last_commit = time.monotonic()
            self.slowest_flush = max(self.slowest_flush, commit.seconds)
            self.saved += len(commit.keys)
        return commit.keys

    def _unsaved(self) -> int:
        """Return the number of rows that were written but are not known to be on the disk."""
        return len(self._waiting) + (len(self._commit.keys) if self._commit else 0)

    def _write(self, record: bytes) -> None:
        try:
            if self._fd < 0:
                self._open()
            written = os.write(self._fd, record)
            while written < len(record):  # a disk that becomes full writes a part, and fails on the next call
                written += os.write(self._fd, record[written:])
        except OSError as error:
            with suppress(OSError):  # cut off the torn record and save the earlier rows, if the disk still allows that
                os.ftruncate(self._fd, self._end)
                if self._commit is not None:
                    self._commit.ended()
                _datasync(self._fd)
                self.saved += self._unsaved()
            self._fail(error)
        self._end += len(record)
        crash_point("record written")

    def _open(self) -> None:
        folder = self.run_dir / FOLDER
        if not own_folder(folder):
            with suppress(FileExistsError):  # several workers may make it at the same time
                folder.mkdir()
            sync_folder(self.run_dir)
        stem = f"{host_name()}-{boot_id()[:8]}-{os.getpid()}"
        number = 0
        while self._fd < 0:
            self.segment = folder / f"{stem}-{number}{SUFFIX}"
            try:
                self._fd = os.open(
                    self.segment, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644
                )
            except FileExistsError:
                number += 1
        sync_folder(folder)

    def _check_place(self) -> None:
        """Raise SetupError if the segment was deleted or moved. Without this check, further rows would be lost without
        an error."""
        assert self.segment is not None
        here = os.fstat(self._fd)
        try:
            there = os.stat(self.segment)
        except OSError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
            self.failed = True
            count = self._count(f", {_are(self._unsaved())} not")
            raise SetupError(
                f"{quote(self.run_dir)} or its journal was moved or deleted during the run{count}. "
                f"Put it back, then {self._advice()}."
            )

    def _count(self, rest: str = "") -> str:
        """Return a clause for a message that states how many rows are saved, or "" if the number is unknown. rest:
        words to add to the clause."""
        return "" if self._rows_before is None else f": {_are(self._rows_before + self.saved)} saved{rest}"

    def _fail(self, error: OSError) -> NoReturn:
        self.failed = True
        raise SetupError(
            f"cannot write in {quote(self.run_dir)} ({reason(error)}){self._count()}. "
            f"{remedy(error).capitalize()}, then {self._advice()}."
        ) from error

    def _advice(self) -> str:
        return self._again or f"continue with {resume_command(self.run_dir)}"


def _are(rows: int) -> str:
    return "1 row is" if rows == 1 else f"{rows} rows are"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
