"""Keeps the finished parts of an unfinished replay, so that the same command continues after an interruption.

A part is the answers to one task, or the figures of one batch of traces with all methods and budgets. Each part is a
file, named by a hash of everything on which the part depends. After a change of settings, model, method or library,
the files have other names, so the replay starts anew. Batches, not single traces, are parts: a trace that is read
alone has figures that differ by rounding, and a continued replay must write the tables of an uninterrupted one.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvbench.errors import SetupError, quote
from kvbench.store.files import open_plain, own_folder, reason, remedy, remove_leftovers, replacing
from kvbench.store.identity import digest

FOLDER = "unfinished"
Arrays = Mapping[str, NDArray[Any]]
_NAME = re.compile(r"[0-9a-f]{64}\.npz")


class Parts:
    """The parts of a replay that are finished.

    out: the folder for the replay's tables; the parts lie in a folder inside it. None: nothing is kept. settings: a
    JSON value with everything on which all parts depend.
    """

    def __init__(self, out: Path | None = None, settings: Any = None) -> None:
        self.folder = None if out is None else out / FOLDER
        self.settings = digest(settings)

    def read(self, what: Any) -> Arrays | None:
        """Return a part; None if it is not kept or its file is damaged. what: a JSON value that names the part, with
        everything on which this part depends beside the settings."""
        if self.folder is None or not own_folder(self.folder):
            return None
        try:
            with open(open_plain(self._path(self.folder, what)), "rb") as file, np.load(file) as arrays:
                return dict(arrays)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile):
            return None

    def write(self, what: Any, arrays: Arrays) -> None:
        """Keep a part. Raises SetupError if it cannot be written. what: as in `read`."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(exist_ok=True)
            own_folder(self.folder)  # no link to another place
            with replacing(self._path(self.folder, what)) as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]  # numpy's stubs take the names for options
        except OSError as error:
            raise SetupError(
                f"{quote(self.folder)} cannot be written: {reason(error)}; {remedy(error)}, then run the command again."
            ) from error

    def remove(self) -> None:
        """Delete all parts in the folder, also those of other settings, after the tables were written."""
        if self.folder is None or not own_folder(self.folder):
            return
        with suppress(OSError):  # parts that stay do no harm
            remove_leftovers(self.folder)
            for path in self.folder.iterdir():
                if _NAME.fullmatch(path.name):
                    path.unlink()
            self.folder.rmdir()

    def _path(self, folder: Path, what: Any) -> Path:
        return folder / f"{digest([self.settings, what])}.npz"
