"""Reads the rows of data files: JSON lines, a JSON list, or CSV, plain or in a zip archive; `read_rows` reads parquet,
too. Only a few rows are in memory at a time.

A file whose name ends in ``.csv`` is a table whose first line names the columns. A file whose first character is ``[``
is a JSON list. Any other file is JSON lines. Every row is an object. Infinite numbers and NaN in JSON, and text that is
not UTF-8, are errors. A byte-order mark, CRLF and blank lines are accepted.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import lzma
import stat
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TextIO

from kvbench.errors import SetupError, UserError, bare, quote
from kvbench.store.strict_json import constant, finite, parse

FILE_LIMIT = 512 * 1024 * 1024  # most bytes of a file that a user gives
CHUNK = 1 << 20
LONGEST_FIELD = 1 << 27  # characters in a CSV field
PARQUET_ROWS = 256  # rows read at a time
# RuntimeError: an encrypted file, or a compression that zipfile does not know.
BROKEN_ARCHIVE = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError)

Row = dict[str, Any]


def unpackable(archive: object, error: Exception) -> str:
    return f"{quote(archive)} is no zip archive that kvbench can unpack ({bare(error)}). Download it again."


class Reading:
    """Iterates over the rows of data files, one file after the other. `sha256` is the hash of all bytes read so far;
    after the last row it is the hash of the whole files (in archives: of the members).

    member: the file with the rows in each archive; "" if the files are not archives.
    """

    def __init__(self, files: Sequence[Path], member: str = "") -> None:
        self.files, self.member = files, member
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows. Raises SetupError for unreadable files and invalid rows."""
        for file in self.files:
            name = str(file)
            try:
                check_plain(file, bare(name), None)
                with file.open("rb") as stream:
                    if self.member:
                        with zipfile.ZipFile(stream) as archive, archive.open(self.member) as inside:
                            yield from self._rows(inside, f"{name}/{self.member}")
                    else:
                        yield from self._rows(stream, name)
            except UserError as error:
                raise SetupError(str(error)) from None
            except KeyError:
                raise SetupError(
                    f"the archive {quote(name)} has no {quote(self.member)}, the file with the task's data. "
                    "Give another archive."
                ) from None
            except BROKEN_ARCHIVE as error:
                raise SetupError(unpackable(name, error)) from None
            except OSError as error:
                raise SetupError(f"cannot read {quote(name)}: {error.strerror or error}.") from None

    def _rows(self, stream: IO[bytes], name: str) -> Iterator[Row]:
        buffered = io.BufferedReader(_Hashing(stream, self._digest), CHUNK)
        text = io.TextIOWrapper(buffered, encoding="utf-8-sig", newline="")  # its destructor closes `buffered`
        for _, row in _numbered_rows(buffered, text, name):
            yield row
        while buffered.read(CHUNK):  # so that the hash also covers bytes after the end of a JSON list
            pass


class _Hashing(io.RawIOBase):
    """A stream that hashes the bytes read through it."""

    def __init__(self, inner: IO[bytes], digest: Any) -> None:
        self.inner, self.digest = inner, digest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = self.inner.read(len(buffer))
        buffer[: len(block)] = block
        self.digest.update(block)
        return len(block)


# --- files that a user gives ------------------------------------------------------------------------------------------


def read_jsonl(file: Path, label: str, *, problems: list[str] | None = None) -> Iterator[tuple[int, Row]]:
    """Yield (line number, object) for each non-blank line of a JSON-lines file of at most `FILE_LIMIT` bytes.

    `label` is the file's name in messages. Raises UserError if the file cannot be read, is not a regular file, is too
    large or is not UTF-8. A line that is not a JSON object also raises UserError. If `problems` is given, such a line
    is skipped instead, and a message on it is appended to `problems`.
    """
    name = bare(label)
    check_plain(file, name, FILE_LIMIT)
    try:
        with file.open("rb") as stream:
            yield from _lines(stream, name, problems)
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}.") from None


def read_rows(file: Path) -> Iterator[tuple[int, Row]]:
    """Yield (number, row) for each row of a user's table: parquet or CSV if the file's name says so, otherwise a JSON
    list or JSON lines.

    number: the line's number in JSON lines, the row's number (from 1) in other forms. Only one block of rows is in
    memory, so the file may have any size. Raises UserError if the file cannot be read as such a table.
    """
    name = bare(file)
    check_plain(file, name, None)
    try:
        if file.suffix == ".parquet":
            yield from enumerate(_parquet_rows(file, name), start=1)
            return
        with file.open("rb") as stream:
            yield from _numbered_rows(stream, io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""), str(file))
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror or error}.") from None


def read_plain(file: Path, name: str, limit: int) -> bytes:
    """Return the bytes of a regular file of at most `limit` bytes. Raises UserError for any other file, without opening
    it, and for a file that cannot be read."""
    check_plain(file, name, limit)
    try:
        with file.open("rb") as stream:
            return stream.read(limit)
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}.") from None


def check_plain(file: Path, name: str, limit: int | None) -> None:
    """Raise UserError unless `file` is a regular file of at most `limit` bytes (None: of any size). name: its name in
    messages."""
    try:
        status = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{name} does not exist.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket"}
    kind = next((noun for test, noun in kinds.items() if test(status.st_mode)), None)
    if kind is None and not stat.S_ISREG(status.st_mode):
        kind = "a device"
    if kind:
        raise UserError(f"{name} is {kind}, not a file.")
    if limit is not None and status.st_size > limit:
        size = f"{name} has {status.st_size / 1e6:,.1f} MB"
        raise UserError(f"{size}; the limit is {limit / 1e6:,.1f} MB. Give a smaller file.")


# --- formats ----------------------------------------------------------------------------------------------------------


def _numbered_rows(stream: io.BufferedReader[Any], text: TextIO, name: str) -> Iterator[tuple[int, Row]]:
    """Yield (number, row) of CSV, a JSON list or JSON lines, as `read_rows` does. text: the text of `stream`."""
    label = bare(name)
    if name.endswith(".csv"):
        yield from enumerate(_csv_rows(text, label), start=1)
    elif stream.peek(1).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
        yield from enumerate(_list_rows(text, label), start=1)
    else:
        yield from _lines(stream, label, None)


def _lines(stream: IO[bytes], name: str, problems: list[str] | None) -> Iterator[tuple[int, Row]]:
    offset = 0
    for number, line in enumerate(stream, start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise _not_utf8(name, line[error.start], offset + error.start) from None
        offset += len(line)
        if not text.strip():
            continue
        try:
            yield number, _parse_line(text.rstrip("\r\n"), f"{name}:{number}")
        except UserError as error:
            if problems is None:
                raise
            problems.append(str(error))


def _not_utf8(name: str, byte: int, offset: int) -> UserError:
    return UserError(f"{name} is not UTF-8 (byte 0x{byte:02x} at offset {offset}). Save it as UTF-8.")


def _list_rows(text: TextIO, name: str) -> Iterator[Row]:
    """Yield the objects of ``[{...}, {...}]``, with only the current row and one block in memory."""
    decoder = json.JSONDecoder(parse_constant=constant, parse_float=finite)
    held, place, number, ended = "", 0, 0, False

    def more() -> None:
        """Drop the parsed text from memory, and read a further block that is at least as long as the unparsed text.
        Because of this length, the time for a long row grows only linearly with the row's length."""
        nonlocal held, place, ended
        try:
            block = text.read(max(CHUNK, len(held) - place))
        except UnicodeDecodeError as error:
            raise UserError(f"{name} is not UTF-8 ({error.reason}). Save it as UTF-8.") from None
        held, place, ended = held[place:] + block, 0, not block

    def mark(allowed: str) -> str:
        """Return the next character that is not blank, without consuming it. Raises UserError if it is not in
        `allowed`."""
        nonlocal place
        while True:
            while place < len(held) and held[place] in " \t\r\n":
                place += 1
            if place < len(held) or ended:
                break
            more()
        character = held[place : place + 1]
        if not character or character not in allowed:
            got = quote(character) if character else "the end of the file"
            wanted = " or ".join(map(quote, allowed))
            raise UserError(f"{name}: not JSON (row {number + 1}: expected {wanted}, got {got}).")
        return character

    mark("[")
    place += 1
    while (character := mark(",]" if number else "{]")) != "]":
        if character == ",":
            place += 1
            mark("{")
        while True:
            try:
                row, end = decoder.raw_decode(held, place)
                break
            except json.JSONDecodeError as error:
                if ended:
                    raise UserError(f"{name}: not JSON (row {number + 1}: {_plain_words(error)}).") from None
                more()
            except (ValueError, RecursionError) as error:
                raise UserError(f"{name}: not JSON (row {number + 1}: {_why(error)}).") from None
        number, place = number + 1, end
        yield row


def _csv_rows(text: TextIO, name: str) -> Iterator[Row]:
    csv.field_size_limit(LONGEST_FIELD)
    rows = csv.reader(text, strict=True)
    try:
        head = next(rows, [])
        for cells in filter(None, rows):  # a blank line has no cells
            if len(cells) != len(head):
                raise UserError(
                    f"{name}:{rows.line_num}: {len(cells)} fields; the first line has {len(head)}. "
                    "Give every line the same number of fields."
                )
            yield dict(zip(head, cells))
    except csv.Error as error:
        raise UserError(f"{name}:{rows.line_num}: not CSV ({error}).") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 ({error.reason}). Save it as UTF-8.") from None


def _parquet_rows(file: Path, name: str) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(PARQUET_ROWS):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, ValueError) as error:
        raise UserError(f"{name}: not parquet ({quote(str(error).splitlines()[0])}).") from None


def _parse_line(line: str, where: str) -> Row:
    try:
        row = parse(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({_plain_words(error)} at column {error.colno}).") from None
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({_why(error)}).") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: must be an object {{...}}; got {json_type(row)}.")
    return row


def _plain_words(error: json.JSONDecodeError) -> str:
    return (error.msg[0].lower() + error.msg[1:].removesuffix(" delimiter")).replace("expecting", "expected")


def _why(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error).split(":")[0].split(";")[0]


def json_type(value: object) -> str:
    """Return the JSON type of a parsed value, in words."""
    names = {dict: "object", list: "list", str: "text", bool: "true/false", int: "number", float: "number"}
    if value is None:
        return "null"
    return names.get(type(value), type(value).__name__)
