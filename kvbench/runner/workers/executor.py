"""The interface between a coordinator and an executor: the order to a worker, events from workers, and `Executor`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvbench.config.run_config import RunConfig
from kvbench.console.figures import Figures
from kvbench.engine.slot_plan import SlotPlan
from kvbench.runner.jobs import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a worker needs to execute jobs of a run.

    out: the results folder. name: the run's name. slots: the plan of slots of each cell, which the coordinator made; a
    worker begins with it, because rows must not depend on the worker's free memory. device: the type of the
    coordinator's device. downloads: models and tasks that a worker may download; None: all.
    """

    config: RunConfig
    out: str
    name: str
    slots: tuple[SlotPlan, ...]
    device: str
    downloads: tuple[str, ...] | None = None
    allow_version_change: bool = False


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker waits for jobs. Except with Slurm, it has loaded the model."""

    worker: str


@dataclass(frozen=True, slots=True)
class Shown:
    """Progress figures of the worker, a few times per second."""

    worker: str
    figures: Figures


@dataclass(frozen=True, slots=True)
class Noticed:
    """The worker has a warning of one line for the user."""

    worker: str
    text: str


@dataclass(frozen=True, slots=True)
class Done:
    """The worker has finished its oldest job. rows: how many rows of the job it has saved."""

    worker: str
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker ended before it finished its jobs: it was killed, its device failed, or memory ran out. `Failed`
    reports other errors."""

    worker: str
    why: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker met an error that every other worker would meet, too.

    code: the exit code of this error. plugin: whether the text is that of a PluginError.
    """

    worker: str
    text: str
    code: int
    plugin: bool = False


Event = Ready | Shown | Noticed | Done | Lost | Failed


class Executor(Protocol):
    """Starts workers and carries jobs to them.

    size: how many workers it has. ahead: how many unfinished jobs a worker may have; None: a worker gets its share of
    all jobs at once.
    """

    size: int
    ahead: int | None

    def start(self, worker: str) -> None:
        """Start a worker of this name; it replaces a lost worker of the same name. Raises SetupError if the worker
        cannot be started."""

    def send(self, worker: str, jobs: Sequence[Job]) -> None:
        """Give a ready worker more jobs. If the worker has died, `events` yields or has yielded a `Lost` for it."""

    def release(self, worker: str) -> None:
        """End a worker. It gets no more jobs; its GPU becomes free. `events` yields no more events of this worker."""

    def events(self, seconds: float) -> Iterator[Event]:
        """Yield the events of all workers. Waits up to this many seconds for the first event."""

    def stop(self, seconds: float) -> None:
        """Ask all workers to save their rows and end. Kill workers that still run after this many seconds."""
