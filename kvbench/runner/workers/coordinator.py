"""Hands the jobs of a run to workers, replaces lost workers, and shows the progress of all."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvbench.console.figures import Figures
from kvbench.console.progress import Progress, rate
from kvbench.errors import KVBenchError, SetupError, bare
from kvbench.runner.jobs import Job
from kvbench.runner.workers.executor import Done, Event, Executor, Failed, Lost, Noticed, Ready, Shown
from kvbench.store.tail import JournalTail

SILENCE = 4 * 3600.0  # seconds without a word after which a worker that has jobs counts as lost
READ = 5.0  # seconds between two looks at the journal
TRIES = 3  # how many workers may be lost at the same rows, or may not start one after the other, before the run ends
GIVEN_UP = TRIES + 1  # starts of a worker that is not started again
PATIENCE = 5.0  # seconds in which workers save their rows at the end
WAIT = 0.25  # seconds for the next event


@dataclass(slots=True)
class _State:
    """What the coordinator knows of a worker."""

    jobs: list[Job] = field(default_factory=list)  # given and not done, oldest first
    ready: bool = False
    starts: int = 0  # since it was last ready
    since: float = 0.0  # when its oldest job began
    heard: float = 0.0  # when it last said something
    figures: Figures = field(default_factory=Figures)
    rows_before: int = 0  # saved by lost workers of this name
    tokens_before: int = 0
    speed: float = 0.0  # tokens per second, smoothed
    at: float = 0.0  # when `figures` came

    def rows(self) -> int:
        return self.rows_before + self.figures.saved

    def tokens(self) -> int:
        return self.tokens_before + self.figures.tokens


class Coordinator:
    """Executes jobs on the workers of an executor.

    before: number of rows that were saved before. say: receives warnings of one line.
    labels: of the run's cells, for messages.
    """

    def __init__(
        self,
        executor: Executor,
        run_dir: Path,
        *,
        before: int = 0,
        progress: Progress,
        say: Callable[[str], None],
        labels: Sequence[str] = (),
    ) -> None:
        self.executor, self.progress, self.say = executor, progress, say
        self.lost = self.retried = 0  # workers that were lost, jobs that run again
        self._before, self._labels = before, labels
        self._waiting: list[Job] = []
        self._states = {str(number): _State() for number in range(1, executor.size + 1)}
        self._tries: Counter[Job] = Counter()
        self._tail = JournalTail(run_dir)
        self._shown = self._looked = 0.0
        self._rows_at_loss = self._fruitless = 0  # rows on the disk at the last loss; losses since then without a row

    @property
    def saved(self) -> int:
        """Number of rows that the workers have saved on the disk, as far as the coordinator knows."""
        return max(len(self._tail.statuses), sum(state.rows() for state in self._states.values()))

    @property
    def failed(self) -> Counter[str]:
        """Number of failed rows by status, such as "oom"."""
        return Counter(status for status in self._tail.statuses.values() if status not in ("ok", "unscored"))

    def run(self, jobs: Sequence[Job]) -> None:
        """Execute all jobs.

        Raises KVBenchError if a worker meets an error that all would meet, if no worker starts, if the same rows lose
        `TRIES` workers, or if `TRIES` times as many workers as there are get lost without a new row.
        """
        self._waiting = list(jobs)
        try:
            for worker in self._states:
                self._start(worker)
            while self._waiting or any(state.jobs for state in self._states.values()):
                for event in self.executor.events(WAIT):
                    self._take(event)
                self._hand_out()
                self._look()
                self._show()
        finally:
            self.executor.stop(PATIENCE)
            self._tail.read()

    def _take(self, event: Event) -> None:
        state = self._states[event.worker]
        state.heard = time.monotonic()
        match event:
            case Ready():
                state.ready, state.starts = True, 0
            case Done():
                state.jobs.pop(0)
                state.since = time.monotonic()
            case Shown(figures=figures):
                self._measure(state, figures)
            case Noticed(text=text):
                self.say(text)
            case Lost(worker, why):
                self._replace(worker, state, why)
            case Failed(text=text, code=code):
                error = KVBenchError(text)
                error.exit_code = code
                raise error

    def _hand_out(self) -> None:
        """Give waiting jobs to workers that have too few."""
        for worker, state in self._states.items():
            if state.ready and self._waiting and (given := self._share(state)):
                if not state.jobs:
                    state.since = state.heard = time.monotonic()
                state.jobs += given
                self.executor.send(worker, given)

    def _share(self, state: _State) -> list[Job]:
        """Take the jobs for a worker from the waiting ones."""
        if self.executor.ahead is not None:
            given = self._waiting[: self.executor.ahead - len(state.jobs)]
            del self._waiting[: len(given)]
            return given
        if state.jobs:
            return []
        step = max(1, sum(not s.jobs for s in self._states.values()))  # every n-th job: a cell is shared by all workers
        given = self._waiting[::step]
        del self._waiting[::step]
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
                self._replace(worker, state, f"it said nothing for {SILENCE / 3600:.0f} hours")

    def _replace(self, worker: str, state: _State, why: str) -> None:
        """Start another worker in place of a lost one, and put back the jobs that it had not finished.

        Raises SetupError if the same rows have lost `TRIES` workers, or all workers together that many times without a
        new row on the disk.
        """
        self.lost += 1
        known = self._rows_at_loss
        self._tail.read()
        self._rows_at_loss = len(self._tail.statuses)
        self._fruitless = self._fruitless + 1 if self._rows_at_loss == known else 1
        if self._fruitless > TRIES * len(self._states):
            raise SetupError(f"{self._fruitless} workers were lost one after the other (the last: {bare(why)}).")
        left = [job for old in state.jobs if (job := old.without(self._tail.statuses)).keys]
        self._waiting[:0] = left
        self.retried += len(left)
        again = f"; {sum(len(job.keys) for job in left)} rows run again" if left else ""
        self.say(f"worker {worker} was lost ({bare(why)}){again}.")
        if left:
            self._tries[left[0]] += 1
            if self._tries[left[0]] == TRIES:
                raise SetupError(
                    f"{TRIES} workers were lost at the same rows of {self._label(left[0])} (the last: {bare(why)})."
                )
        starts = 0 if state.ready else state.starts
        self._states[worker] = _State(starts=starts, rows_before=state.rows(), tokens_before=state.tokens())
        if starts < TRIES:
            self._start(worker)
            return
        self._states[worker].starts = GIVEN_UP
        if all(s.starts == GIVEN_UP for s in self._states.values()):
            raise SetupError(f"no worker starts (the last: {bare(why)}).")

    def _start(self, worker: str) -> None:
        self._states[worker].starts += 1
        self.executor.start(worker)

    def _label(self, job: Job) -> str:
        return self._labels[job.cell] if job.cell < len(self._labels) else f"cell {job.cell}"

    def _measure(self, state: _State, figures: Figures) -> None:
        now = time.monotonic()
        if figures.saved < state.figures.saved:  # the same worker began to count anew
            state.rows_before += state.figures.saved
        if state.at:
            state.speed = rate(state.speed, figures.tokens - state.figures.tokens, now - state.at)
        state.figures, state.at = figures, now

    def _show(self) -> None:
        """Show the sums over all workers, and a line per worker."""
        if time.monotonic() - self._shown < WAIT:
            return
        self._shown = time.monotonic()
        states = self._states.values()
        shown = [state.figures for state in states]
        told = f"{sum(state.ready for state in states)} of {len(self._states)} workers"
        if self.lost:
            told += f", {self.lost} lost, {self.retried} jobs again"
        self.progress.cell(told)
        self.progress.below([self._line(worker, state) for worker, state in self._states.items()])
        self.progress.update(
            self._before + sum(state.rows() for state in states),
            sum(state.tokens() for state in states),
            sum(f.kv_now for f in shown),
            sum(f.kv_peak for f in shown),
        )

    def _line(self, worker: str, state: _State) -> str:
        if not state.ready:
            return f"worker {worker}  {'does not start' if state.starts == GIVEN_UP else 'starting'}"
        if not state.jobs:
            return f"worker {worker}  idle"
        minutes, seconds = divmod(round(time.monotonic() - state.since), 60)
        speed = f"{state.speed:,.0f} tok/s"
        return f"worker {worker}  {self._label(state.jobs[0])}  {speed}  {minutes}:{seconds:02d} at this job"
