"""Follows a journal to which other processes write."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from kvbench.store.files import open_plain
from kvbench.store.journal import FOLDER
from kvbench.store.recovery import segments_on_disk, unpack


class JournalTail:
    """Reads the rows that other processes add to a journal after this object was made.

    Each record is read once, and its row is not checked, because the workers of this run wrote it. statuses: {row key:
    status} of the rows read so far.
    """

    def __init__(self, run_dir: Path) -> None:
        self.statuses: dict[str, str] = {}
        self._run_dir = run_dir
        # segment -> bytes that were read, or that it had before this object was made
        self._read = segments_on_disk(run_dir)

    def read(self) -> None:
        """Read the records added since the last call. A last record that is not complete yet is left for the next
        call."""
        for name, size in segments_on_disk(self._run_dir).items():
            begin = self._read.get(name, 0)
            if size > begin:
                self._read[name] = begin + self._take(name, begin, size - begin)

    def refresh(self) -> None:
        """Make a network disk show what other machines have written.

        An NFS client may report a folder's files and a file's size as they were up to a minute ago. It asks the server
        when a file is opened (nfs(5), close-to-open consistency) and when a folder's mode is set, so this method does
        both.
        """
        for folder in (self._run_dir, self._run_dir / FOLDER):
            with suppress(OSError):
                os.chmod(folder, stat.S_IMODE(os.stat(folder).st_mode))
        for name in segments_on_disk(self._run_dir):
            os.close(open_plain(self._run_dir / FOLDER / name))

    def _take(self, name: str, begin: int, length: int) -> int:
        """Read the complete records in a part of a segment, and return how many bytes these records have. begin: where
        the part begins in the segment, in bytes. length: the number of bytes of the part."""
        whole = 0
        with open(open_plain(self._run_dir / FOLDER / name), "rb") as file:
            file.seek(begin)
            while (line := file.readline(length - whole)).endswith(b"\n"):
                whole += len(line)
                if record := unpack(line):
                    self.statuses[record["row"].get("row_key")] = record["row"].get("status")
        return whole
