"""Waits until this machine sees the rows that workers on other machines have saved."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from kvbench.errors import SetupError, counted, quote
from kvbench.runner.jobs import Job
from kvbench.store import resume_command
from kvbench.store.tail import JournalTail

PATIENCE = 120.0  # seconds; by default an NFS client caches the list of a folder's files for at most 60 seconds
PAUSE = 1.0  # seconds between two readings of the journal


class ReportedRows:
    """Counts the rows that workers have reported as saved, and waits until this machine sees them all.

    A network disk may show rows late. Without the wait, the run's tables could lack rows.
    """

    def __init__(self, run_dir: Path, tail: JournalTail) -> None:
        self._run_dir, self._tail = run_dir, tail
        self._jobs: list[Job] = []
        self._rows = 0

    def add(self, job: Job, rows: int) -> None:
        """Note that a worker has saved this number of a job's rows."""
        self._jobs.append(job)
        self._rows += rows

    def unseen(self) -> int:
        """Return how many reported rows this machine has not read from the journal yet."""
        return max(0, self._rows - sum(key in self._tail.statuses for job in self._jobs for key in job.keys))

    def wait(self, say: Callable[[str], None]) -> None:
        """Read the journal until all reported rows are there. say: receives a warning if the first reading lacks rows.

        Raises SetupError after `PATIENCE` seconds.
        """
        deadline, told = time.monotonic() + PATIENCE, False
        while rows := self.unseen():
            self._tail.refresh()
            self._tail.read()
            if not self.unseen():
                return
            if time.monotonic() > deadline:
                raise SetupError(
                    f"{quote(self._run_dir)} lacks {counted(rows, 'row')} that workers have saved, even after "
                    f"{PATIENCE:.0f} s: "
                    f"the network disk shows them late. Wait, then continue with {resume_command(self._run_dir)}."
                )
            if not told:
                missing = counted(rows, "row")
                say(f"waiting up to {PATIENCE:.0f} s until the network disk shows {missing} that workers have saved.")
                told = True
            time.sleep(PAUSE)
