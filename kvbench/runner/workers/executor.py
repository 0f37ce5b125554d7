"""What a coordinator and the workers of an executor tell each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvbench.config.run_config import RunConfig
from kvbench.console.figures import Figures
from kvbench.runner.jobs import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a worker needs to execute jobs of a run.

    out, name: where the run's folder is. slots: of each cell, as the coordinator planned them: rows must not depend on
    what else is in a worker's memory. device: the type of the coordinator's device. downloads: models and tasks that a
    worker may download; None: all.
    """

    config: RunConfig
    out: str
    name: str
    slots: tuple[int, ...]
    device: str
    downloads: tuple[str, ...] | None = None
    allow_version_change: bool = False


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker has loaded the model, and waits for jobs."""

    worker: str


@dataclass(frozen=True, slots=True)
class Shown:
    """Figures of the worker's present job, a few times per second."""

    worker: str
    figures: Figures


@dataclass(frozen=True, slots=True)
class Noticed:
    """A warning of one line."""

    worker: str
    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """The worker has saved all rows of its oldest job that it can generate. rows: how many."""

    worker: str
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker ended before its jobs, without an error of kvbench: it was killed, or its device failed."""

    worker: str
    why: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker met an error that every other worker would meet, too. code: the exit code of this error."""

    worker: str
    text: str
    code: int


Event = Ready | Shown | Noticed | Done | Lost | Failed


class Executor(Protocol):
    """Starts workers and carries jobs to them.

    name: as in ``--executor``. size: how many workers it has. ahead: how many jobs a worker gets at a time; None: its
    share of all jobs at once.
    """

    name: str
    size: int
    ahead: int | None

    def start(self, worker: str) -> None:
        """Start a worker, also in place of a lost one of this name. Raises SetupError if no worker can be started."""

    def send(self, worker: str, jobs: Sequence[Job]) -> None:
        """Give a ready worker more jobs. If the worker is gone, an event `Lost` follows or came before."""

    def release(self, worker: str) -> None:
        """Let a worker end that gets no more jobs. Its GPU becomes free; no event of it follows."""

    def events(self, seconds: float) -> Iterator[Event]:
        """Yield what workers said. Waits up to this time for the first event."""

    def stop(self, seconds: float) -> None:
        """Ask all workers to save their rows and end. Kill those that live longer than this time."""
