"""Reads the journal: the valid records, one per row key, and notices about dropped records.

`read_journal` may run at any time, also while a process writes: each segment is read up to the length that it had at
the beginning. If the caller passes the content that an earlier call returned, only the records added since are read.
Texts are not kept in memory; `TextReader` reads the record again when the texts of a row are needed.

A torn last record is dropped, and a damaged record is skipped. Both are reported, and a row that has no other record is
generated again. A record that is not a row counts as damaged even if its checksum is right, because a journal may come
from anyone.

If a row has several records, those with status "ok" count before all others. Among equals, those with the highest
`score_pass` (how often the answer was scored again) count. In the order of segment names and positions, the record
taken is then

- the first with status "ok",
- else the last with an answer,
- else the last.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.errors import SetupError, bare, few, quote
from kvbench.store.files import open_plain, own_folder, plain_size
from kvbench.store.journal import FOLDER, SUFFIX
from kvbench.store.schema import FINAL, OK, UNSCORED, is_text, read_row
from kvbench.store.strict_json import parse

_LONGEST = 256 << 20  # bytes of a record
_KEY = re.compile(rb'[0-9a-f]{8} {"kind":"row","row":{"row_key":"([0-9a-f]{24})"')  # the beginning of a row's record
MOST_OPEN = 64  # segments that a `TextReader` keeps open; systems commonly allow 1,024 open files


@dataclass(frozen=True, slots=True)
class Entry:
    """A row, and where its record stands in the journal."""

    row: dict[str, Any]
    segment: str
    offset: int
    length: int

    @property
    def ok(self) -> bool:
        return bool(self.row["status"] == OK)

    @property
    def rank(self) -> tuple[bool, int, bool]:
        """The rank of this record: of several records of a row, the one with the highest rank counts."""
        return self.ok, self.scored, self.generated

    def counts_before(self, other: Entry) -> bool:
        """Whether this record counts instead of `other`, a record of the same row. The order in which the two records
        were read does not matter."""
        if self.rank != other.rank:
            return self.rank > other.rank
        earlier = (self.segment, self.offset) < (other.segment, other.offset)
        return earlier if self.ok else not earlier

    @property
    def generated(self) -> bool:
        """Whether the row has an answer, scored or not."""
        return self.ok or self.row["status"] in UNSCORED

    @property
    def final(self) -> bool:
        """Whether the row has no answer and another attempt would fail in the same way."""
        return self.row["status"] in FINAL

    @property
    def scored(self) -> int:
        """How many times `kvbench score` has scored the answer again."""
        return int(self.row.get("score_pass") or 0)

    @property
    def outcome(self) -> tuple[object, ...]:
        """The output's hash, its number of tokens, and the score. If two answers of one sample differ in outcome,
        generation or scoring was not deterministic."""
        return tuple(self.row.get(name) for name in ("output_sha256", "output_tokens", "score"))


@dataclass(slots=True)
class JournalContent:
    """The content of a journal: its rows, its segments, and facts about dropped records."""

    entries: dict[str, Entry] = field(default_factory=dict)  # row key -> the record that counts
    segments: dict[str, int] = field(default_factory=dict)  # segment -> its length in bytes, in order
    duplicates: int = 0  # "ok" records read after another "ok" record of the same row and `score_pass`
    nondeterministic_duplicates: int = 0  # duplicates whose output or score differs from the earlier record's
    ends: dict[str, int] = field(default_factory=dict)  # segment -> bytes of the lines read
    torn: dict[str, int] = field(default_factory=dict)  # segment -> offset of a last line without its line end
    unfinished: dict[str, str] = field(default_factory=dict)  # segment -> key of the row in that line, if it shows one
    damaged: dict[str, list[int]] = field(default_factory=dict)  # segment -> offsets of damaged records

    @property
    def done(self) -> set[str]:
        """Keys of the rows that need not be generated again."""
        return {key for key, entry in self.entries.items() if entry.generated or entry.final}

    @property
    def dropped(self) -> int:
        """Number of torn or damaged records."""
        return len(self.torn) + sum(map(len, self.damaged.values()))

    @property
    def notices(self) -> list[str]:
        """Lines for the user about dropped records, and about rows that were generated twice with different results. A
        dropped last record is left out if its row has another record, with which the run continues."""
        lines, done = [], self.done
        for name in self.segments:
            if (offset := self.torn.get(name)) is not None and self.unfinished.get(name) not in done:
                lines.append(f"{bare(name)}: the unfinished record at offset {offset} is dropped; its row runs again.")
            if name in self.damaged:
                shown = few(list(map(str, self.damaged[name])), 5)
                lines.append(f"{bare(name)}: damaged records are skipped, at offset {shown}; their rows run again.")
        if n := self.nondeterministic_duplicates:
            lines.append(f"rows generated twice with different results: {n}; the first result of each counts.")
        return lines

    def add(self, entry: Entry) -> None:
        key = entry.row["row_key"]
        former = self.entries.get(key)
        if former is not None and entry.ok and former.ok and entry.scored == former.scored:
            self.duplicates += 1
            self.nondeterministic_duplicates += former.outcome != entry.outcome
        if former is None or entry.counts_before(former):
            self.entries[key] = entry


class TextReader:
    """Fetches the texts of rows from the journal. Callers use it as a context manager, because it keeps files open: the
    `MOST_OPEN` segments that it opened last."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._fds: dict[str, int] = {}

    def read(self, entry: Entry) -> tuple[str | None, str | None, str | None]:
        """Return prompt, output and turns (a JSON list) of a row; None in place of each text that the row lacks. Raises
        as `record` does."""
        record = unpack(self.record(entry)) or {}  # its row was checked when the journal was read
        if not _is_texts(text := record.get("text") or {}):
            raise self._changed(entry)
        return text.get("prompt"), text.get("output"), text.get("turns")

    def record(self, entry: Entry) -> bytes:
        """Return the bytes of a row's record. Raises SetupError if the segment changed since it was read,
        OSError if it cannot be opened."""
        if entry.segment not in self._fds:
            if len(self._fds) >= MOST_OPEN:
                os.close(self._fds.pop(next(iter(self._fds))))  # the one opened first
            self._fds[entry.segment] = open_plain(self._folder / entry.segment)
        record = os.pread(self._fds[entry.segment], entry.length, entry.offset)
        if not _intact(record):
            raise self._changed(entry)
        return record

    def _changed(self, entry: Entry) -> SetupError:
        return SetupError(
            f"{quote(self._folder / entry.segment)} changed while it was read. Check the disk, then try again."
        )

    def __enter__(self) -> TextReader:
        return self

    def __exit__(self, *error: object) -> None:
        for fd in self._fds.values():
            os.close(fd)


def decode(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line of the journal, after checking its row and adding the columns that the row lacks.
    None if the record is torn or damaged, or is not a row. line: the line with its line end."""
    if (record := unpack(line)) is None:
        return None
    row, text = read_row(record["row"]), record.get("text") or {}
    return None if row is None or not _is_texts(text) else {"kind": "row", "row": row, "text": text}


def unpack(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line of the journal without checking its row's columns. None if the record is torn or
    damaged, or is not a row. line: the line with its line end."""
    if not _intact(line):
        return None
    try:
        record = parse(line[9:-1])
    except ValueError:
        return None
    if not isinstance(record, dict) or record.get("kind") != "row" or not isinstance(record.get("row"), dict):
        return None
    return record


def _intact(line: bytes) -> bool:
    return line[-1:] == b"\n" and line[:9] == b"%08x " % zlib.crc32(line[9:-1])


def segments_on_disk(run_dir: Path) -> dict[str, int]:
    """Return the journal's segments with their lengths in bytes, sorted by name. Empty segments are left out."""
    folder = run_dir / FOLDER
    names = sorted(n for n in os.listdir(folder) if n.endswith(SUFFIX)) if own_folder(folder) else []
    return {name: size for name in names if (size := plain_size(folder / name))}


def read_journal(run_dir: Path, known: JournalContent | None = None) -> JournalContent:
    """Read the journal up to its present end. known: the result of an earlier call; only the records added since then
    are read, and `known` itself is updated and returned. If a segment has become shorter or was deleted, the whole
    journal is read again."""
    segments = segments_on_disk(run_dir)
    if known is None or any(segments.get(name, 0) < end for name, end in known.ends.items()):
        known = JournalContent()
    for name, size in segments.items():
        if known.segments.get(name) != size:
            _read_on(known, run_dir / FOLDER, name, size)
    known.segments = segments
    return known


def _read_on(content: JournalContent, folder: Path, name: str, size: int) -> None:
    """Read those lines of a segment that `content` lacks, and add their rows to `content`. size: the segment's
    length in bytes."""
    content.torn.pop(name, None)
    content.unfinished.pop(name, None)
    for offset, line in _lines(folder / name, content.ends.get(name, 0), size):
        if (record := decode(line)) is not None:
            content.add(Entry(record["row"], name, offset, len(line)))
        elif line.endswith(b"\n"):
            content.damaged.setdefault(name, []).append(offset)
        else:
            content.torn[name] = offset
            if key := _KEY.match(line):
                content.unfinished[name] = key[1].decode()
            return
        content.ends[name] = offset + len(line)


def _lines(path: Path, offset: int, size: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, line) for the lines between the offsets `offset` and `size`. A line of _LONGEST bytes or more is
    not a record. Of such a line the first _LONGEST bytes are yielded; then the function stops, even if lines follow."""
    with open(open_plain(path), "rb") as file:
        file.seek(offset)
        while offset < size and (line := file.readline(min(size - offset, _LONGEST))):
            yield offset, line
            if len(line) == _LONGEST:
                return
            offset += len(line)


def _is_texts(text: Any) -> bool:
    """Return whether `text` is a dictionary in which each value is a text or None. The value of `turns`, if there is
    one and it is not empty, must be a JSON list of texts."""
    if not isinstance(text, dict) or not all(v is None or is_text(v) for v in text.values()):
        return False
    if not text.get("turns"):
        return True
    try:
        turns = parse(text["turns"])
    except ValueError:
        return False
    return isinstance(turns, list) and all(map(is_text, turns))
