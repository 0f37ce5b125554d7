"""Hands the jobs of a run to workers, replaces lost workers, and shows the progress of all workers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from kvbench.console.progress import Progress
from kvbench.errors import KVBenchError, PluginError, SetupError, bare, counted
from kvbench.runner.jobs import Job
from kvbench.runner.workers import reported
from kvbench.runner.workers.executor import Done, Event, Executor, Failed, Lost, Noticed, Ready, Shown
from kvbench.runner.workers.worker_state import TRIES, WorkerState
from kvbench.store.tail import JournalTail

SILENCE = 4 * 3600.0  # seconds without an event after which a worker that has jobs counts as lost
READ = 5.0  # seconds between two readings of the journal
PATIENCE = 5.0  # seconds that workers have to save their rows at the end
WAIT = 0.25  # seconds to wait for the next event


class Coordinator:
    """Executes jobs on the workers of an executor.

    before: number of rows that were saved before this process began. say: receives warnings of one line. labels: names
    of the run's cells, for messages. state: returns the end of a message about lost workers: how many rows are saved,
    and how to continue.
    """

    def __init__(
        self,
        executor: Executor,
        run_dir: Path,
        *,
        before: int,
        progress: Progress,
        say: Callable[[str], None],
        labels: Sequence[str],
        state: Callable[[], str],
    ) -> None:
        self.executor, self.progress, self.say = executor, progress, say
        self.lost = self.retried = 0  # number of lost workers; number of jobs that were handed out again
        self._before, self._labels, self._state = before, labels, state
        self._waiting: list[Job] = []
        self._states = {str(number): WorkerState() for number in range(1, executor.size + 1)}
        self._tries: Counter[Job] = Counter()
        self._run_dir, self._tail = run_dir, JournalTail(run_dir)
        self._done: list[tuple[Job, int]] = []  # finished jobs, each with the number of its rows that were saved
        self._shown = self._looked = 0.0
        self._rows_at_loss = 0  # rows on the disk when the last worker was lost
        self._fruitless = 0  # workers lost one after the other without a new row on the disk in between

    @property
    def saved(self) -> int:
        """Number of rows that the workers have saved on the disk, as far as the coordinator knows."""
        return max(len(self._tail.statuses), sum(state.rows for state in self._states.values()))

    @property
    def failed(self) -> Counter[str]:
        """Number of failed rows by status, such as "oom"."""
        return Counter(status for status in self._tail.statuses.values() if status not in ("ok", "unscored"))

    def run(self, jobs: Sequence[Job]) -> None:
        """Execute all jobs.

        Raises KVBenchError in these cases:

        - a worker meets an error that every worker would meet;
        - no worker starts;
        - `TRIES` workers were lost at the same rows;
        - more workers than `TRIES` times the executor's number of workers were lost, and no row was saved in between;
        - this machine does not see all saved rows.
        """
        self._waiting = list(jobs)
        try:
            self._start()
            while self._waiting or any(state.jobs for state in self._states.values()):
                for event in self.executor.events(WAIT):
                    self._take(event)
                self._start()
                self._hand_out()
                self._release()
                self._look()
                self._show()
        finally:
            self.executor.stop(PATIENCE)
            self._tail.read()
        reported.wait_for(self._done, self._run_dir, self._tail, self.say, self._state)

    def _take(self, event: Event) -> None:
        state = self._states[event.worker]
        state.heard = time.monotonic()
        match event:
            case Ready():
                state.ready, state.starts = True, 0
            case Done(rows=rows):
                self._done.append((state.jobs.pop(0), rows))
                state.since = time.monotonic()
            case Shown(figures=figures):
                state.measure(figures)
            case Noticed(text=text):
                self.say(text)
            case Lost(worker, why):
                self._replace(worker, state, why)
            case Failed(text=text, plugin=True):
                raise PluginError(text)
            case Failed(text=text, code=code):
                error = KVBenchError(text)
                error.exit_code = code
                raise error

    def _hand_out(self) -> None:
        """Give waiting jobs to ready workers that have fewer jobs than the executor allows (`Executor.ahead`)."""
        for worker, state in self._states.items():
            if state.ready and self._waiting and (given := self._share(state)):
                if not state.jobs:
                    state.since = state.heard = time.monotonic()
                state.jobs += given
                self.executor.send(worker, given)

    def _share(self, state: WorkerState) -> list[Job]:
        """Take jobs for a worker from the waiting jobs, and return them."""
        if self.executor.ahead is not None:
            given = self._waiting[: self.executor.ahead - len(state.jobs)]
            del self._waiting[: len(given)]
            return given
        if state.jobs:
            return []
        idle = sum(s.active and not s.jobs for s in self._states.values())
        given = self._waiting[::idle]  # every n-th job, so that each worker gets jobs of every cell
        del self._waiting[::idle]
        return given

    def _look(self) -> None:
        """Read new rows of the journal, and replace workers that are silent for too long."""
        now = time.monotonic()
        if now - self._looked < READ:
            return
        self._looked = now
        self._tail.read()
        for worker, state in list(self._states.items()):
            if state.jobs and now - state.heard > SILENCE:
                self.executor.release(worker)
                self._replace(worker, state, f"it said nothing for {SILENCE / 3600:.0f} hours")

    def _replace(self, worker: str, state: WorkerState, why: str) -> None:
        """Put the unfinished jobs of a lost worker back among the waiting jobs. `_start` replaces the worker if needed.
        Raises SetupError if no worker starts or too many workers were lost, see `run`."""
        self.lost += 1
        known = self._rows_at_loss
        self._tail.refresh()
        self._tail.read()
        self._rows_at_loss = len(self._tail.statuses)
        self._fruitless = self._fruitless + 1 if self._rows_at_loss == known else 1
        if self._fruitless > TRIES * len(self._states):
            raise SetupError(
                f"{self._fruitless} workers were lost one after the other, and no row was saved in between "
                f"(the last worker: {bare(why)}): {self._state()}."
            )
        left = [job for old in state.jobs if (job := old.without(self._tail.statuses)).keys]
        self._waiting[:0] = left
        self.retried += len(left)
        rows = sum(len(job.keys) for job in left)
        again = f"; {counted(rows, 'row')} {'runs' if rows == 1 else 'run'} again" if rows else ""
        self.say(f"worker {worker} was lost ({bare(why)}){again}.")
        if left:
            self._tries[left[0]] += 1
            if self._tries[left[0]] == TRIES:
                raise SetupError(
                    f"{TRIES} workers were lost while they generated the same rows of {self._labels[left[0].cell]} "
                    f"(the last worker: {bare(why)}): {self._state()}."
                )
        self._states[worker] = state.ended(0 if state.ready else state.starts)
        if all(s.given_up for s in self._states.values()):
            raise SetupError(f"no worker starts (the last attempt: {bare(why)}): {self._state()}.")

    def _start(self) -> None:
        """Start workers until there are as many as unfinished jobs, or no more can be started."""
        jobs = len(self._waiting) + sum(len(state.jobs) for state in self._states.values())
        lacking = jobs - sum(state.active for state in self._states.values())
        free = [worker for worker, state in self._states.items() if not state.active and not state.given_up]
        for worker in free[: max(0, lacking)]:
            state = self._states[worker]
            state.active, state.starts = True, state.starts + 1
            self.executor.start(worker)

    def _release(self) -> None:
        """When no job is waiting, end the workers without jobs, because an idle GPU costs money."""
        if self._waiting or not any(state.jobs for state in self._states.values()):
            return
        for worker, state in self._states.items():
            if state.active and not state.jobs:
                self.executor.release(worker)
                self._states[worker] = state.ended(0 if state.ready else state.starts - 1)

    def _show(self) -> None:
        """Show figures summed over all workers, and a line per worker."""
        if time.monotonic() - self._shown < WAIT:
            return
        self._shown = time.monotonic()
        states = self._states.values()
        shown = [state.figures for state in states]
        told = f"{sum(state.ready for state in states)} of {len(self._states)} workers"
        if self.lost:
            told += f", {self.lost} lost, {self.retried} jobs again"
        self.progress.cell(told)
        self.progress.below(
            [f"worker {w}  {s.line(self._labels[s.jobs[0].cell] if s.jobs else '')}" for w, s in self._states.items()]
        )
        self.progress.update(
            self._before + sum(state.rows for state in states),
            sum(state.tokens for state in states),
            sum(f.kv_now for f in shown),
            sum(f.kv_peak for f in shown),
        )
