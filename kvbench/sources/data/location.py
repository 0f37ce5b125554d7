"""Finds a task's rows on this disk: the files and their form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal
from urllib.parse import urlsplit

from kvbench.errors import SetupError, few
from kvbench.sources.data.formats import Reading, Row
from kvbench.task import Manifest

Source = Literal["--data", "KVBENCH_DATA", "bundled", "hub"]
FORMS = (".jsonl", ".json", ".csv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a task's rows are: the files that hold them, in reading order, and their form.

    member: the file with the rows inside each archive; "" if the files are no archives. raw: the rows still have the
    hub's column names and no ids of kvbench. table: the file is kvbench's copy of a table on the hub. sample: the path
    of the sample that replaces the data; "" for the data themselves.
    """

    source: Source
    files: tuple[Path, ...]
    member: str = ""  # the file with the rows inside each file, if these are archives
    raw: bool = False  # the rows are as on the hub, before kvbench renames columns and adds ids
    table: bool = False  # kvbench's copy of a table on the hub, identified by its revision, not by its bytes
    sample: str = ""  # the manifest's path of a sample that replaces the data; "" for the data themselves
    revision: str | None = None
    name: str = ""  # in records and messages; by default the first file
    images: Path | None = None  # the folder of the image files that the rows name; by default the first file's

    @property
    def location(self) -> str:
        return self.name or few(list(map(str, self.files)), 1)

    @property
    def image_folder(self) -> Path:
        return self.images or self.files[0].parent

    def reading(self) -> Reading:
        return Reading(self.files, self.member)

    def rows(self, reading: Reading, manifest: Manifest) -> Iterator[Row]:
        """Yield the rows that belong to a task, with kvbench's column names and ids, whatever form the files have.

        Raises SetupError.
        """
        for index, row in enumerate(reading):
            taken = _offline(index, row, manifest) if self.raw else row
            if _fits(taken, manifest.where):
                yield taken


def holds_rows(manifest: Manifest) -> bool:
    """Return whether the data consist of rows; otherwise they are a file that the task parses itself."""
    return not manifest.url or bool(manifest.member) or manifest.rows is not None


def raw_names(manifest: Manifest) -> tuple[str, ...]:
    """Return the names under which a data folder holds the raw files (from the hub or a web address), beside `path`."""
    if manifest.files:
        return tuple(PurePosixPath(file).name for file in manifest.files)
    return (PurePosixPath(urlsplit(manifest.url).path).name,) if manifest.url else ()


def in_folder(folder: Path, manifest: Manifest, source: Source) -> Place | None:
    """Find a task's rows in a data folder; None if the folder has none.

    They are at the manifest's `path` in any form, or else in raw files beside it, or else in a sample of the data.
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
                f"the data for {manifest.path} have no column {error}, from which the ids of the rows are made."
            ) from None
    return named


def _fits(row: Mapping[str, Any], where: Mapping[str, Any]) -> bool:
    return all(row.get(column) == value for column, value in where.items())
