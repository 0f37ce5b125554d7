"""Where ``train --data`` points: a file, a folder, or a data set on the hub, ``hub:NAME[:SPLIT][@REVISION]``.

kvbench downloads a data set as it downloads the data of tasks (`kvbench.sources.data.hub_data`): its rows become JSON
lines in the download cache, in a folder named after the commit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from kvbench.errors import SetupError, UserError, quote
from kvbench.sources import hub
from kvbench.sources.data import hub_data
from kvbench.task import Manifest
from kvbench.train.data_rows import data_files

HUB = "hub:"
ADDRESS = re.compile(rf"{HUB}(?P<name>[^:@]+)(:(?P<split>\w[\w.-]*))?(@(?P<revision>[\w./-]+))?", re.ASCII)
SPLIT = "train"


@dataclass(frozen=True, slots=True)
class DataPlace:
    """Where training data lie. path: the file or folder that holds the rows. name: how the cards of trained weights
    name the data: by a hub address, or by the last part of the path."""

    path: Path
    name: str


def check_data(data: str) -> None:
    """Raise UserError unless `data` is a usable file or folder, or a well-formed hub address. Sends no request."""
    if data.startswith(HUB):
        _manifest(data)
    else:
        data_files(Path(data))


def short_name(data: str) -> str:
    """Return the name of the data in the command on a card: a hub address unchanged, or the last part of a path."""
    return data if data.startswith(HUB) else Path(data).name


def locate(data: str) -> DataPlace:
    """Return where the rows are on this machine; downloads a data set that is not in the cache.

    Raises UserError for a malformed address. Raises SetupError if the data set, at the commit in the address, is not in
    the cache and cannot be downloaded.
    """
    if not data.startswith(HUB):
        return DataPlace(Path(data), short_name(data))
    manifest, revision = _manifest(data)
    place = hub_data.fetch("", manifest, revision)
    if hub.is_commit(revision) and place.revision != revision:
        raise SetupError(
            f"the local cache has {quote(manifest.hub)} at revision {place.revision}, not at {quote(revision)}. "
            "Run the command once with network access."
        )
    return DataPlace(place.files[0], f"{HUB}{manifest.hub}:{manifest.split}@{place.revision}")


def _manifest(data: str) -> tuple[Manifest, str | None]:
    """Return the data set that a hub address names, and the revision if the address has one."""
    found = ADDRESS.fullmatch(data)
    if found is None or not hub.is_name(found["name"]):
        raise UserError(f"--data {quote(data)} is no hub address; write hub:OWNER/NAME[:SPLIT][@REVISION].")
    return Manifest(path="", rows=None, hub=found["name"], split=found["split"] or SPLIT), found["revision"]
