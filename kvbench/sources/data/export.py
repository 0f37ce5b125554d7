"""Copies task data from this machine, the hub or a web address into a folder for ``--data``, for machines without a
network.

Raw files are copied unchanged. A single file goes to the manifest's `path` (with the suffix ``.csv`` if it is a CSV
file). Several files, or a zip archive, go beside this path under their own names. Tables, and data whose columns are
renamed or to which ids are added, become JSON lines.

A task is skipped if its data are already in the folder and correct. A repeated command therefore continues an
interrupted one. If the caller gives a revision, no task is skipped.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

from kvbench.errors import KVBenchError, SetupError, quote
from kvbench.sources.data import hub_data, images
from kvbench.sources.data.cache import Bar, keeping
from kvbench.sources.data.location import Place, in_folder, raw_names
from kvbench.sources.data.source import Data, DataUsed
from kvbench.task import Manifest


def fetch(task: str, manifest: Manifest, out: Path, *, revision: str | None = None, bar: Bar | None = None) -> DataUsed:
    """Put a task's data into the folder `out` unless they are there, and read the written data once to check them.

    revision: the revision on the hub to use instead of the pinned revision. The files are then written even if `out`
    has them, and their rows may differ from the manifest. Raises SetupError if the data cannot be downloaded or
    written; without `revision`, also if they differ from the manifest.
    """
    there = Data(out, allow_mismatch=True, env={})
    if revision is None and in_folder(out, manifest, "--data") is not None:
        with contextlib.suppress(KVBenchError):  # damaged data are fetched again
            if (used := there.check(task, manifest)) and not used.mismatch:
                return used
    place = _here(task, manifest, revision) or hub_data.fetch(task, manifest, revision or manifest.revision, bar)
    for target, source in _copies(out, manifest, place).items():
        if source is not None:
            _copy(source, target)
            continue
        with keeping(target) as file:
            for row in place.rows(place.reading(), manifest):
                file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    if manifest.images:
        _copy_images(place, manifest, (out / manifest.path).parent)
    used = there.check(task, manifest)
    if used is None or (used.mismatch and revision is None):
        what = used.mismatch if used else "nothing was written"
        where = used.location if used else place.location
        raise SetupError(
            f"data of task {quote(task)} in {quote(where)} are not the expected ones: {what}. "
            "Use --data-revision to choose another revision."
        )
    return used


def _here(task: str, manifest: Manifest, revision: str | None) -> Place | None:
    """Return where a task's data are on this machine, or None if they are not here. Data in the folder KVBENCH_DATA are
    used only if they match the manifest."""
    mine = Data(revision=revision, allow_mismatch=True)
    with contextlib.suppress(KVBenchError):
        if (used := mine.check(task, manifest)) and not used.mismatch:
            return mine.find(task, manifest)
    return Data(revision=revision, env={}).find(task, manifest)


def _copy_images(place: Place, manifest: Manifest, folder: Path) -> None:
    """Copy the image files that the data's rows name into `folder`."""
    for name in images.every_name(place.rows(place.reading(), manifest), manifest.images):
        source, target = (images.inside(root, name, "the data") for root in (place.image_folder, folder))
        if source.is_file() and source != target:
            _copy(source, target)


def _copy(source: Path, target: Path) -> None:
    with keeping(target) as file, source.open("rb") as stream:
        shutil.copyfileobj(stream, file, 1 << 20)


def _copies(out: Path, manifest: Manifest, place: Place) -> dict[Path, Path | None]:
    """Return, for each file to write into `out`, the file to copy, or None if the rows are written as JSON lines."""
    path = out / manifest.path
    changed = place.table or (place.raw and (manifest.rename or manifest.hub_id))
    if changed:
        return {path: None}
    if place.raw and (place.member or len(place.files) > 1):
        return {path.parent / name: file for name, file in zip(raw_names(manifest), place.files)}
    return {path.with_suffix(".csv") if place.files[0].suffix == ".csv" else path: place.files[0]}
