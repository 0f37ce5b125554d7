"""A commit of the journal: it syncs the journal's segment to disk in a thread, while generation goes on.

A sync takes milliseconds on most disks and seconds on some. The journal waits only a moment for the sync, except in
`flush` and `close`; rows that it writes during the sync belong to the next commit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence


class Commit:
    """A sync of a journal segment to disk, in a background thread that the constructor starts.

    If no thread can be started, the constructor itself syncs. `keys`: the keys of the rows that are safe once the sync
    has succeeded. `seconds`: how long the sync took.
    """

    def __init__(self, sync: Callable[[], None], keys: Sequence[str]) -> None:
        self.keys, self.seconds = list(keys), 0.0
        self._sync = sync
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvbench-commit", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no thread can be started: sync in this thread
            self._run()

    def ended(self, patience: float | None = None) -> bool:
        """Wait up to `patience` seconds for the sync (None: without limit), and return whether it has ended. Raises the
        exception that the sync raised."""
        if self._thread.ident is not None:
            self._thread.join(patience)
        if self._error is not None:
            raise self._error
        return not self._thread.is_alive()

    def _run(self) -> None:
        start = time.monotonic()
        try:
            self._sync()
        except BaseException as error:  # after any error it is unknown whether the rows are on disk
            self._error = error
        self.seconds = time.monotonic() - start
