"""What a coordinator knows of one worker."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kvbench.console.figures import Figures
from kvbench.console.progress import rate
from kvbench.runner.jobs import Job

TRIES = 3  # a worker that was started this often in a row without becoming ready is not started again


@dataclass(slots=True)
class WorkerState:
    """What a coordinator knows of one worker.

    active: whether it was started, and neither lost nor released since then. rows_before, tokens_before: rows and
    tokens that workers of this name generated earlier; `figures` does not count them.
    """

    active: bool = False
    ready: bool = False
    jobs: list[Job] = field(default_factory=list)  # jobs that it has received and not finished, oldest first
    starts: int = 0  # how often it was started since it was last ready
    since: float = 0.0  # when its oldest job began
    heard: float = 0.0  # when its last event came
    figures: Figures = field(default_factory=Figures)
    rows_before: int = 0
    tokens_before: int = 0
    speed: float = 0.0  # tokens per second, smoothed
    at: float = 0.0  # when `figures` came

    @property
    def rows(self) -> int:
        """Number of rows that this worker and the earlier workers of its name have saved."""
        return self.rows_before + self.figures.saved

    @property
    def tokens(self) -> int:
        return self.tokens_before + self.figures.tokens

    @property
    def given_up(self) -> bool:
        return not self.active and self.starts >= TRIES

    def ended(self, starts: int) -> WorkerState:
        """Return the new state after this worker was lost or released. starts: how often the worker was started since
        it was last ready; the new state stores this number."""
        return WorkerState(starts=starts, rows_before=self.rows, tokens_before=self.tokens)

    def measure(self, figures: Figures) -> None:
        """Store new figures, and update the speed."""
        now = time.monotonic()
        if figures.saved < self.figures.saved:  # the same worker began to count anew
            self.rows_before += self.figures.saved
        if self.at:
            self.speed = rate(self.speed, figures.tokens - self.figures.tokens, now - self.at)
        self.figures, self.at = figures, now

    def line(self, label: str) -> str:
        """Return the worker's line in the progress display. label: the cell of its oldest job."""
        if not self.active:
            return "does not start" if self.given_up else "no work left"
        if not self.ready:
            return "starting"
        if not self.jobs:
            return "idle"
        minutes, seconds = divmod(round(time.monotonic() - self.since), 60)
        return f"{label}  {self.speed:,.0f} tok/s  {minutes}:{seconds:02d} at this job"
