"""Workers in the jobs of a Slurm array, through submitit.

Each Slurm job of the array receives one worker's share of the run's jobs when it is submitted. It executes this share
in a child process, and ends. Nothing else is sent to it; its rows in the run's journal show its progress.

submitit stores calls, results and logs as files. They lie in a folder of the user's cache, because the calls and
results are pickles, and a results folder must hold no code and no pickles.
"""

from __future__ import annotations

import importlib
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvbench.console import faults, signals
from kvbench.console.figures import Figures
from kvbench.errors import SetupError, bare
from kvbench.runner.jobs import Job
from kvbench.runner.workers.executor import Done, Event, Failed, Lost, Order, Ready, Shown
from kvbench.runner.workers.local import LocalExecutor
from kvbench.runner.workers.slurm_parameters import CLUSTER, REQUEUES, Parameters, for_submitit
from kvbench.sources.data import cache
from kvbench.store.recovery import read_journal
from kvbench.store.tail import JournalTail

POLL = 2.0  # seconds between two readings of the journal and of the Slurm jobs' results
ASK = 60.0  # seconds between two calls of sacct, which submitit by itself calls only every ten minutes
LATE = 10.0  # seconds for a result to show on a shared disk after its Slurm job has ended
SAVING = 8.0  # seconds that a worker has to save its rows before its Slurm job ends
FIRST = "1"  # the name of a Slurm job's only worker
OF_SUBMITIT = {signal.SIGUSR1, signal.SIGUSR2}


class Share:
    """One worker's share of the run's jobs: a callable that submitit stores in a file and calls in the Slurm job.

    If Slurm requeues the Slurm job, the repeated call generates only the rows that are not saved yet.
    """

    def __init__(self, order: Order, jobs: Sequence[Job]) -> None:
        self._order, self._jobs = order, tuple(jobs)
        self._workers: LocalExecutor | None = None

    def __call__(self) -> list[Event]:
        """Execute the jobs, and return the worker's events. The events are a `Done` per finished job, warnings and, if
        the worker ended early, a `Lost` or `Failed`."""
        saved = read_journal(Path(self._order.out) / self._order.name).done
        left = [job.without(saved) for job in self._jobs]
        if not any(job.keys for job in left):
            return [Done(FIRST, len(job.keys)) for job in self._jobs]
        before = iter([len(job.keys) - len(rest.keys) for job, rest in zip(self._jobs, left, strict=True)])
        events = self._execute(left)
        return [Done(FIRST, event.rows + next(before)) if isinstance(event, Done) else event for event in events]

    def _execute(self, jobs: list[Job]) -> list[Event]:
        self._workers = LocalExecutor(self._order, [None])
        try:
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, OF_SUBMITIT)  # these signals would kill the child
            self._workers.start(FIRST)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return _until_done(self._workers, jobs)
        finally:
            self._workers.stop(SAVING)

    def checkpoint(self) -> Any:
        """Save the finished rows, and return the call that the requeued Slurm job is to make. submitit calls this
        method when Slurm is about to end the Slurm job."""
        if self._workers is not None:
            self._workers.stop(SAVING)
        return importlib.import_module("submitit").helpers.DelayedSubmission(Share(self._order, self._jobs))


def _until_done(workers: LocalExecutor, jobs: list[Job]) -> list[Event]:
    told: list[Event] = []
    while sum(isinstance(event, Done) for event in told) < len(jobs):
        for event in workers.events(1.0):
            match event:
                case Ready():
                    workers.send(FIRST, jobs)
                case Shown():
                    pass
                case Lost() | Failed():
                    return [*told, event]
                case _:
                    told.append(event)
    return told


@dataclass(slots=True)
class _Running:
    """A submitted share of a worker.

    done: for how many of the share's jobs the coordinator has received `Done`. ended: the time when the coordinator
    began to wait for the result file, because the Slurm job had ended or all rows were saved; None: it has not begun to
    wait.
    """

    jobs: list[Job]
    job: Any
    done: int = 0
    ended: float | None = None


class SlurmExecutor:
    """Workers in the jobs of a Slurm array. Raises SetupError if this machine cannot submit Slurm jobs.

    workers: the number of workers. parameters: from `slurm_parameters.parse_parameters`. gpus: whether a worker needs
    a GPU.
    """

    ahead: int | None = None

    def __init__(self, order: Order, *, workers: int, parameters: Parameters, gpus: bool) -> None:
        self.size, self._order = workers, order
        self._fresh: list[str] = []  # workers that have no share yet
        self._shares: dict[str, list[Job]] = {}  # worker -> its share, which is not submitted yet
        self._running: dict[str, _Running] = {}
        self._polled, self._asked = 0.0, time.monotonic()
        self._whole = True  # no worker was lost
        place = cache.folder() / "slurm"
        place.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix=f"{order.name}-", dir=place))
        self._submitit = importlib.import_module("submitit")
        self._executor = self._connect(parameters, gpus)
        self._tail = JournalTail(Path(order.out) / order.name)
        signals.at_end(self._cancel_all)

    def _connect(self, parameters: Parameters, gpus: bool) -> Any:
        cluster = parameters.get(CLUSTER, ("slurm",))[0]
        try:
            executor = self._submitit.AutoExecutor(self._folder, cluster=cluster, slurm_max_num_timeout=REQUEUES)
            known = self._submitit.SlurmExecutor._valid_parameters()
            given = for_submitit(parameters, known, gpus=gpus)
            at_once = {"slurm_array_parallelism": self.size}  # submitit's own limit is 256
            executor.update_parameters(name=f"kvbench-{self._order.name}", **at_once | given)
        except Exception as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise SetupError(f"this machine cannot submit Slurm jobs ({bare(faults.first_line(error))}).") from error
        return executor

    def start(self, worker: str) -> None:
        self._fresh.append(worker)

    def send(self, worker: str, jobs: Sequence[Job]) -> None:
        self._shares[worker] = list(jobs)

    def release(self, worker: str) -> None:
        """Forget a worker that has received no jobs yet. A worker with jobs is left alone, because its Slurm job ends
        by itself after these jobs."""
        self._fresh = [fresh for fresh in self._fresh if fresh != worker]

    def events(self, seconds: float) -> Iterator[Event]:
        self._submit()
        while self._fresh:
            yield Ready(self._fresh.pop())
            seconds = 0
        if time.monotonic() - self._polled < POLL:
            time.sleep(seconds)
            return
        self._polled = time.monotonic()
        self._tail.read()
        if self._running and self._polled - self._asked >= ASK:
            self._asked = self._polled
            next(iter(self._running.values())).job.done(force_check=True)  # submitit asks for all jobs at once
        for worker in list(self._running):
            yield from self._poll(worker, self._running[worker])

    def _submit(self) -> None:
        """Submit all shares that are not submitted yet, as one Slurm array. Raises SetupError if Slurm refuses them."""
        if not self._shares:
            return
        shares, self._shares = self._shares, {}
        try:
            jobs = self._executor.submit_array([Share(self._order, share) for share in shares.values()])
        except (self._submitit.core.utils.FailedJobError, subprocess.CalledProcessError, OSError) as error:
            raise SetupError(f"Slurm refuses the jobs ({bare(faults.first_line(error))}).") from error
        for (worker, share), job in zip(shares.items(), jobs):
            self._running[worker] = _Running(share, job)

    def _poll(self, worker: str, running: _Running) -> Iterator[Event]:
        keys = [[key in self._tail.statuses for key in job.keys] for job in running.jobs]
        yield Shown(worker, Figures(saved=sum(map(sum, keys))))
        while running.done < len(keys) - 1 and all(keys[running.done]):  # the last job ends with its Slurm job
            yield Done(worker, len(keys[running.done]))
            running.done += 1
        if (events := self._ended(running, saved=all(map(all, keys)))) is not None:
            del self._running[worker]
            yield from self._last_words(worker, running, events)

    def _ended(self, running: _Running, *, saved: bool) -> list[Event] | None:
        """Return the events of a share that has ended; None if the share has not ended.

        saved: whether all rows of the share are saved. If so, the share may count as ended although Slurm has not
        reported the end of the Slurm job.
        """
        job = running.job
        if not job.done() and not saved:
            return None
        if job.paths.result_pickle.exists():
            outcome, told = self._submitit.core.utils.pickle_load(job.paths.result_pickle)
            return list(told) if outcome == "success" else [Lost(FIRST, told.strip().splitlines()[-1])]
        running.ended = running.ended or time.monotonic()
        if time.monotonic() - running.ended < (LATE + SAVING if saved else LATE):
            return None
        if saved:
            self._cancel([job])
            return [Done(FIRST, len(job.keys)) for job in running.jobs]
        return [Lost(FIRST, f"Slurm job {job.job_id} is {job.state.lower()}; its log is {job.paths.stderr}")]

    def _last_words(self, worker: str, running: _Running, events: list[Event]) -> Iterator[Event]:
        done = [event for event in events if isinstance(event, Done)]
        yield from (replace(event, worker=worker) for event in done[running.done :])
        for event in events:
            if isinstance(event, Lost | Failed):
                self._whole = False
                self._cancel([running.job])  # Slurm may have requeued it
            if not isinstance(event, Done):
                yield replace(event, worker=worker)

    def stop(self, seconds: float) -> None:
        """Cancel the Slurm jobs, whose workers then save their rows. Wait up to `seconds` for the Slurm jobs to end.
        Then remove submitit's folder, if every submitted share had ended before the call and no worker was lost."""
        deadline = time.monotonic() + seconds
        self._cancel_all()
        signals.not_at_end(self._cancel_all)
        while time.monotonic() < deadline and not all(running.job.done() for running in self._running.values()):
            time.sleep(0.1)
        if self._whole and not self._running:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _cancel_all(self) -> None:
        self._cancel([running.job for running in self._running.values()])

    def _cancel(self, jobs: Sequence[Any]) -> None:
        """Cancel Slurm jobs with a single call of scancel, which takes about as long for a thousand jobs as for one."""
        if self._executor.cluster != "slurm":  # processes of this machine
            for job in jobs:
                job.cancel(check=False)
        elif jobs:
            subprocess.call(["scancel", *(job.job_id for job in jobs)])
