"""Waits until this machine sees the rows that workers on other machines have saved."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvbench.errors import SetupError, counted, quote
from kvbench.runner.jobs import Job
from kvbench.store.tail import JournalTail

PATIENCE = 120.0  # seconds; by default an NFS client caches the list of a folder's files for at most 60 seconds
PAUSE = 1.0  # seconds between two readings of the journal


def wait_for(
    done: Sequence[tuple[Job, int]],
    run_dir: Path,
    tail: JournalTail,
    say: Callable[[str], None],
    state: Callable[[], str],
) -> None:
    """Read the journal until it shows all rows that workers have reported as saved.

    A network disk may show rows late. Without the wait, the run's tables could lack rows. done: the finished jobs, each
    with the number of its rows that a worker has saved. say: receives a warning if the first reading lacks rows. state:
    returns the end of a message: how many rows are saved, and how to continue. Raises SetupError after `PATIENCE`
    seconds.
    """

    def unseen() -> int:
        seen = sum(key in tail.statuses for job, _ in done for key in job.keys)
        return max(0, sum(rows for _, rows in done) - seen)

    deadline, told = time.monotonic() + PATIENCE, False
    while rows := unseen():
        tail.refresh()
        tail.read()
        if not unseen():
            return
        missing = counted(rows, "row")
        if time.monotonic() > deadline:
            raise SetupError(
                f"{quote(run_dir)} lacks {missing} that workers have saved, even after {PATIENCE:.0f} s: "
                f"the network disk shows them late. Wait a few minutes; {state()}."
            )
        if not told:
            say(f"waiting up to {PATIENCE:.0f} s until the network disk shows {missing} that workers have saved.")
            told = True
        time.sleep(PAUSE)
