"""Finds a task's data on this disk: which files hold the rows, and in which form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal
from urllib.parse import urlsplit

from kvbench.errors import SetupError, few
from kvbench.sources.data.formats import Reading, Row
from kvbench.task import Manifest

Source = Literal["--data", "KVBENCH_DATA", "bundled", "hub"]
FORMS = (".jsonl", ".json", ".csv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a task's data are: the files that hold their rows, in reading order, and the form of the files."""

    source: Source
    files: tuple[Path, ...]
    member: str = ""  # the file with the rows inside each archive; "" if the files are not archives
    raw: bool = False  # whether the rows are as on the hub: kvbench has not renamed columns and added ids yet
    table: bool = False  # whether it is kvbench's copy of a table on the hub, identified by revision instead of hash
    sample: str = ""  # the manifest's path of a sample that replaces the data; "" for the data themselves
    revision: str | None = None
    name: str = ""  # what records and messages call it; default: the first file's path
    images: Path | None = None  # the folder of the image files that the rows name; default: the first file's folder

    @property
    def location(self) -> str:
        return self.name or few(list(map(str, self.files)), 1)

    @property
    def image_folder(self) -> Path:
        return self.images or self.files[0].parent

    def reading(self) -> Reading:
        return Reading(self.files, self.member)

    def rows(self, reading: Reading, manifest: Manifest) -> Iterator[Row]:
        """Yield the rows that belong to a task, with kvbench's column names and ids. Raises SetupError."""
        for index, row in enumerate(reading):
            taken = _offline(index, row, manifest) if self.raw else row
            if all(taken.get(column) == value for column, value in manifest.where.items()):
                yield taken


def raw_names(manifest: Manifest) -> tuple[str, ...]:
    """Return the names of raw files (from the hub or a web address) in a data folder. Their folder is the parent folder
    of `manifest.path`."""
    if manifest.files:
        return tuple(PurePosixPath(file).name for file in manifest.files)
    return (PurePosixPath(urlsplit(manifest.url).path).name,) if manifest.url else ()


def in_folder(folder: Path, manifest: Manifest, source: Source) -> Place | None:
    """Find a task's data in a data folder; None if the folder has none.

    The function first looks for a file at the manifest's `path`, in any form of `FORMS`. Then it looks for raw files
    beside this path, then for a sample of the data.
    """
    path = folder / manifest.path
    for file in (path, *(path.with_suffix(form) for form in FORMS)):
        if file.is_file():
            return Place(source=source, files=(file,))
    raw = tuple(path.parent / name for name in raw_names(manifest))
    if raw and all(file.is_file() for file in raw):
        return Place(source=source, files=raw, member=manifest.member, raw=True)
    for sample in manifest.samples:
        place = Place(source=source, files=(folder / sample,), sample=sample)
        if place.files[0].is_file() and any(place.rows(place.reading(), manifest)):
            return place
    return None


def _offline(index: int, row: Row, manifest: Manifest) -> Row:
    named = {manifest.rename.get(column, column): value for column, value in row.items()}
    if manifest.hub_id is not None:
        try:
            named["id"] = manifest.hub_id(index, row)
        except KeyError as error:
            raise SetupError(
                f"the data for {manifest.path} have no column {error}; kvbench makes the rows' ids from it. Give data "
                "that have it."
            ) from None
    return named
