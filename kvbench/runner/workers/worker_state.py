"""What a coordinator knows of one worker."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kvbench.console.figures import Figures
from kvbench.console.progress import rate
from kvbench.runner.jobs import Job

TRIES = 3  # starts one after the other, without becoming ready, after which a worker is not started again


@dataclass(slots=True)
class WorkerState:
    """What a coordinator knows of one worker.

    active: it was started, and neither lost nor released since then. rows_before, tokens_before: of former workers of
    this name.
    """

    active: bool = False
    ready: bool = False
    jobs: list[Job] = field(default_factory=list)  # given and not done, oldest first
    starts: int = 0  # since it was last ready
    since: float = 0.0  # when its oldest job began
    heard: float = 0.0  # when it last said something
    figures: Figures = field(default_factory=Figures)
    rows_before: int = 0
    tokens_before: int = 0
    speed: float = 0.0  # tokens per second, smoothed
    at: float = 0.0  # when `figures` came

    @property
    def rows(self) -> int:
        """Number of rows that workers of this name have saved."""
        return self.rows_before + self.figures.saved

    @property
    def tokens(self) -> int:
        return self.tokens_before + self.figures.tokens

    @property
    def given_up(self) -> bool:
        return not self.active and self.starts >= TRIES

    def ended(self, starts: int) -> WorkerState:
        """Return the state after this worker was lost or released. starts: of the next one of its name so far."""
        return WorkerState(starts=starts, rows_before=self.rows, tokens_before=self.tokens)

    def measure(self, figures: Figures) -> None:
        """Take new figures, and measure the speed."""
        now = time.monotonic()
        if figures.saved < self.figures.saved:  # the same worker began to count anew
            self.rows_before += self.figures.saved
        if self.at:
            self.speed = rate(self.speed, figures.tokens - self.figures.tokens, now - self.at)
        self.figures, self.at = figures, now

    def line(self, label: str) -> str:
        """Return what the progress display says of the worker. label: the cell of its oldest job."""
        if not self.active:
            return "does not start" if self.given_up else "no work left"
        if not self.ready:
            return "starting"
        if not self.jobs:
            return "idle"
        minutes, seconds = divmod(round(time.monotonic() - self.since), 60)
        return f"{label}  {self.speed:,.0f} tok/s  {minutes}:{seconds:02d} at this job"
