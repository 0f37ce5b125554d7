"""Finds, reads and checks the data of a run's tasks: compares their rows with the manifests."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvbench.errors import SetupError, quote
from kvbench.sources.data import hub_data
from kvbench.sources.data.images import ImageFiles
from kvbench.sources.data.location import Place, Source, in_folder
from kvbench.sources.data.missing import DataMissing
from kvbench.task import Manifest

SHOWN = 3  # how many samples of data the note to the user names; the run's record names all
BUNDLED = Path(__file__).parents[2] / "bundled"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataUsed:
    """Where a task's data came from, and what identifies them.

    `mismatch`: how the data differ from the manifest; "" if they do not. `sample`: whether a sample replaced the data.
    `also`: further data that the same task read.
    """

    task: str
    source: Source
    location: str  # files, or the hub's name of the data set
    revision: str | None  # commit on the hub
    sha256: str | None  # hash of the files with the rows, and of the image files that the rows name
    ids_sha256: str | None = None  # hash of the rows' sorted ids, one per line
    rows: int | None = None
    mismatch: str = ""
    sample: bool = False
    also: tuple[DataUsed, ...] = ()


class Data:
    """Finds, reads and checks the data of a run's tasks.

    path: the value of ``--data``: a folder with files at the manifests' paths or, if the run has one task, the data
    file. revision: the hub revision to use instead of those that manifests pin. allow_mismatch: accept and record data
    whose rows, ids or hash differ from the manifest, instead of raising SetupError.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        revision: str | None = None,
        allow_mismatch: bool = False,
        env: Mapping[str, str] = os.environ,
    ) -> None:
        self.path = Path(path).expanduser() if path is not None else None
        self.revision, self.allow_mismatch = revision, allow_mismatch
        self.env_path = Path(env["KVBENCH_DATA"]).expanduser() if env.get("KVBENCH_DATA") else None
        self.used: dict[str, DataUsed] = {}

    def rows(self, task: str, manifest: Manifest) -> list[dict[str, Any]]:
        """Return the rows of a task in the source's order, with kvbench's column names. Raises SetupError."""
        place = self.ensure(task, manifest)
        rows: list[dict[str, Any]] = []
        used = _examine(task, manifest, place, rows)
        if used.mismatch and not (self.allow_mismatch or place.sample):
            where = f"{quote(place.location)} ({used.source}{f', revision {used.revision}' if used.revision else ''})"
            raise SetupError(
                f"data of task {quote(task)} in {where} are not the expected ones: {used.mismatch}. "
                "Point --data or KVBENCH_DATA to the right data; --allow-data-mismatch uses the present data and "
                "records the mismatch."
            )
        self._record(used)
        return rows

    def file(self, task: str, manifest: Manifest) -> Path:
        """Return the path of a data file that the task parses itself. Raises SetupError."""
        place = self.ensure(task, manifest)
        if len(place.files) > 1:
            raise SetupError(
                f"data of task {quote(task)} are {len(place.files)} files instead of one; give one with --data."
            )
        used = _examine_file(task, manifest, place)
        if used.mismatch and not self.allow_mismatch:
            raise SetupError(
                f"{quote(place.location)} ({used.source}) is not the expected file of task {quote(task)}: "
                f"{used.mismatch}. --allow-data-mismatch uses it and records the mismatch."
            )
        self._record(used)
        return place.files[0]

    def find(self, task: str, manifest: Manifest) -> Place | None:
        """Return where a task's data are on this machine; None if they must be downloaded first. Raises SetupError if
        the user gave a folder that lacks the data; the next source is not tried."""
        given: tuple[tuple[Source, Path | None], ...] = (("--data", self.path), ("KVBENCH_DATA", self.env_path))
        for source, folder in given:
            if folder is None:
                continue
            if not folder.exists():
                raise SetupError(f"{source} {quote(folder)} does not exist. Give a folder or file with the data.")
            if folder.is_file():
                return Place(source=source, files=(folder,), member=manifest.member if folder.suffix == ".zip" else "")
            if (place := in_folder(folder, manifest, source)) is None:
                where = f"{source} has no data"
                file = quote(folder / manifest.path)
                text = f"{where} for task {quote(task)}: looked for {file}. Give a folder that has it."
                raise DataMissing(text, task=task, manifest=manifest, where=where, folder=folder)
            return place
        bundled = BUNDLED / manifest.path
        if bundled.is_file():
            return Place(source="bundled", files=(bundled,))
        return hub_data.cached(manifest, self.revision or manifest.revision)

    def ensure(self, task: str, manifest: Manifest) -> Place:
        """Download a task's data unless they are on this machine; return where they are. Raises SetupError."""
        place = self.find(task, manifest)
        return place or hub_data.fetch(task, manifest, self.revision or manifest.revision)

    def missing(self, wanted: Mapping[str, Manifest]) -> list[DataMissing]:
        """Return an error for each task whose data are not on this machine. Downloads nothing. Raises SetupError if a
        folder that the user gave does not exist."""
        errors = []
        for task, manifest in wanted.items():
            try:
                if self.find(task, manifest) is None:
                    errors.append(hub_data.elsewhere(task, manifest))
            except DataMissing as error:
                errors.append(error)
        return errors

    def check(self, task: str, manifest: Manifest) -> DataUsed | None:
        """Read a task's data and return where they came from; None if the data are not on this machine.

        The result also says in `mismatch` how the data differ from the manifest. Raises SetupError if the data cannot
        be read, or if a folder that the user gave lacks them.
        """
        if (place := self.find(task, manifest)) is None:
            return None
        if manifest.url and not manifest.member and manifest.rows is None:  # a file that the task parses itself
            return _examine_file(task, manifest, place)
        return _examine(task, manifest, place, None)

    def notes(self) -> list[str]:
        """Return notes to the user, one line each: which data are samples, and which differ from their manifest."""
        mismatches = [part for used in self.used.values() for part in (used, *used.also) if part.mismatch]
        samples = [f"{quote(used.task)}: {used.mismatch}" for used in mismatches if used.sample]
        others = [f"data of task {quote(used.task)} differ: {used.mismatch}." for used in mismatches if not used.sample]
        more = f"; and {len(samples) - SHOWN} more" if len(samples) > SHOWN else ""
        text = f"data are samples, not the real data: {'; '.join(samples[:SHOWN])}{more}."
        return [text, *others] if samples else others

    def _record(self, used: DataUsed) -> None:
        first = self.used.get(used.task)
        if first is None or first.location == used.location:
            self.used[used.task] = replace(used, also=first.also if first else ())
        else:
            others = tuple(other for other in first.also if other.location != used.location)
            self.used[used.task] = replace(first, also=(*others, used))


def _examine(task: str, manifest: Manifest, place: Place, kept: list[dict[str, Any]] | None) -> DataUsed:
    """Read all rows of a task's data and compare them with the manifest. kept: a list to which the rows are appended;
    None: the rows are dropped."""
    reading = place.reading()
    images = ImageFiles(task, place.image_folder, manifest.images) if manifest.images else None
    ids: list[str] = []
    count = 0
    for row in place.rows(reading, manifest):
        if images is not None:
            row = images.attach(count, row)
        count += 1
        if "id" in row:
            ids.append(str(row["id"]))
        if kept is not None:
            kept.append(row)
    ids_sha256 = _hash_ids(ids) if ids and len(ids) == count else None
    if place.sample:
        of = f" of {manifest.rows} rows" if manifest.rows else f" row{'s' * (count != 1)}"
        mismatch = f"a sample: {count}{of} ({place.sample})"
    else:
        mismatch = _mismatch(manifest, count, ids, ids_sha256)
    sha256 = None if place.table else reading.sha256
    if images is not None:
        sha256 = images.sha256(sha256)
    return _used(task, place, sha256, mismatch, ids_sha256=ids_sha256, rows=count)


def _examine_file(task: str, manifest: Manifest, place: Place) -> DataUsed:
    file = place.files[0]
    try:
        with file.open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise SetupError(f"cannot read {quote(file)}: {error.strerror}.") from None
    wrong = manifest.url_sha256 and sha256 != manifest.url_sha256
    return _used(task, place, sha256, f"sha256 {sha256[:12]} instead of {manifest.url_sha256[:12]}" if wrong else "")


def _used(task: str, place: Place, sha256: str | None, mismatch: str, **rows: Any) -> DataUsed:
    return DataUsed(
        task=task,
        source=place.source,
        location=place.location,
        revision=place.revision,
        sha256=sha256,
        mismatch=mismatch,
        sample=bool(place.sample),
        **rows,
    )


def _hash_ids(ids: Sequence[str]) -> str:
    return hashlib.sha256("".join(f"{i}\n" for i in sorted(ids)).encode()).hexdigest()


def _mismatch(manifest: Manifest, count: int, ids: Sequence[str], ids_sha256: str | None) -> str:
    if manifest.rows is not None and count != manifest.rows:
        return f"{count} rows instead of {manifest.rows}"
    if len(set(ids)) < len(ids):
        return "some ids occur twice"
    if manifest.ids_sha256 and ids_sha256 is None:
        return "rows without an id"
    return "other ids" if manifest.ids_sha256 and ids_sha256 != manifest.ids_sha256 else ""
