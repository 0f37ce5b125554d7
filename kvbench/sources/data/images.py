"""Finds and hashes the image files that a task's data rows name. Their pixels are read only when a prompt needs them.

A name is a path relative to one folder; a leading slash is ignored, because MMDU's file has such names. Names with
``..``, a backslash, a colon or NUL are errors. Symbolic links are followed, as they are for the files with the rows.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from kvbench.errors import SetupError, UserError, quote
from kvbench.sources.data.cache import keeping
from kvbench.sources.data.formats import BROKEN_ARCHIVE, Row, check_plain, unpackable
from kvbench.task import Image

LIMIT = 64 * 1024**2  # most bytes of one file in an archive


class ImageFiles:
    """Replaces the names of image files in a task's data rows by `Image`s, after hashing the files. column: the column
    that holds the names."""

    def __init__(self, task: str, folder: Path, column: str) -> None:
        self.task, self.folder, self.column = task, folder, column
        self._images: dict[str, Image] = {}
        self._digest = hashlib.sha256()

    def attach(self, index: int, row: Row) -> Row:
        """Return the row with an `Image` in place of an image's name, or with a tuple of `Image`s in place of a list of
        names. Raises SetupError. index: the row's number in the data, from 0, for messages."""
        where = f"data of task {quote(self.task)}, row {index + 1}"
        images = tuple(self._image(name, where) for name in names(row, self.column, where))
        return row | {self.column: images if isinstance(row[self.column], list) else images[0]}

    def sha256(self, of_rows: str | None) -> str:
        """Return one hash over the rows' hash (`of_rows`) and the hashes of all images attached so far."""
        return hashlib.sha256(f"{of_rows}\n{self._digest.hexdigest()}".encode()).hexdigest()

    def _image(self, name: str, where: str) -> Image:
        if name not in self._images:
            path = inside(self.folder, name, where)
            try:
                check_plain(path, f"{where}: image {quote(path)}", None)
                with path.open("rb") as stream:
                    digest = hashlib.file_digest(stream, "sha256").hexdigest()
            except UserError as error:
                raise SetupError(str(error)) from None
            except OSError as error:
                raise SetupError(f"{where}: image {quote(path)} cannot be read: {error.strerror}.") from None
            self._digest.update(json.dumps([name, digest]).encode())
            self._images[name] = Image(name=name, path=path, sha256=digest)
        return self._images[name]


def names(row: Mapping[str, Any], column: str, where: str) -> list[str]:
    """Return the names of the image files in a column of a row. Raises SetupError unless the column holds one name or a
    non-empty list of names. where: which row it is, in words, for the message."""
    value = row.get(column)
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(name, str) and name for name in listed) or not listed:
        raise SetupError(
            f"{where}: column {quote(column)} must be the name of an image file or a non-empty list of names. Correct "
            "the row."
        )
    return listed


def every_name(rows: Iterable[Row], column: str) -> list[str]:
    """Return the names of all image files in a column of a task's data rows, each once."""
    return list(dict.fromkeys(n for i, row in enumerate(rows) for n in names(row, column, f"row {i + 1}")))


def inside(folder: Path, name: str, where: str) -> Path:
    """Return the path of an image file in a folder. Raises SetupError for a name that leads out of the folder. where:
    the row or archive that names the image, in words, for the message."""
    relative = name.lstrip("/")
    if not is_inside(relative):
        raise SetupError(f"{where}: image {quote(name)} is not a path inside the folder of the data.")
    return folder / relative


def is_inside(name: str) -> bool:
    """Return whether a name is a relative path that stays inside its folder."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and not {*"\\:\0"} & {*name} and ".." not in path.parts


def unpack(archive: Path, wanted: Iterable[str], folder: Path) -> None:
    """Write the files that `wanted` names from a zip archive into a folder. Raises SetupError. A name that the archive
    lacks is skipped; reading the row with this name then fails."""
    try:
        with zipfile.ZipFile(archive) as packed:
            sizes = {member.filename: member.file_size for member in packed.infolist()}
            for name in wanted:
                member, target = name.lstrip("/"), inside(folder, name, f"archive {quote(archive.name)}")
                if member in sizes:
                    if sizes[member] > LIMIT:
                        raise SetupError(
                            f"{quote(member)} in {quote(archive)} is larger than {LIMIT:,} bytes, the limit of an "
                            "image. Delete the archive and fetch it again."
                        )
                    with keeping(target) as file:
                        file.write(packed.read(member))
    except (*BROKEN_ARCHIVE, OSError) as error:
        raise SetupError(unpackable(archive, error)) from None


def encoded(rows: Iterable[Row], column: str, pixels: str, folder: Path) -> Iterator[Row]:
    """Write the image of each row to a file in `folder`, and yield the row without the image. pixels: the column with
    the bytes of the encoded image. column: the column with the name of the file to write."""
    for index, row in enumerate(rows):
        where = f"row {index + 1}"
        cell = row[pixels] or {}
        if not cell.get("bytes"):
            raise SetupError(f"{where} of the downloaded data has no image in its column {quote(pixels)}.")
        (name,) = names(row, column, where)
        with keeping(inside(folder, name, where)) as file:
            file.write(cell["bytes"])
        yield {key: value for key, value in row.items() if key != pixels}
