"""Workers without a model, in simulated time: random durations, random deaths. Run as a script; prints a Markdown row.

    cd tests && python -m support.stub_workers --workers 200 --rows 100000

A stub writes the rows of its jobs to a real segment of a real journal, each as soon as its random duration is over. It
dies at random moments, often between two rows of a job and sometimes in the middle of a record. The coordinator is the
real one. Its time is the CPU time of its thread without that of the stubs.
"""

from __future__ import annotations

import argparse
import heapq
import random
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from kvbench.console.figures import Figures
from kvbench.console.progress import Progress
from kvbench.runner.jobs import Job
from kvbench.runner.workers.coordinator import Coordinator
from kvbench.runner.workers.executor import Done, Event, Lost, Ready, Shown
from kvbench.store import Journal
from kvbench.store.recovery import read_journal

START = 30.0  # simulated seconds until a worker is ready
ROW = 5.0  # mean simulated seconds per row


class StubExecutor:
    """Simulated workers. deaths: mean number of rows after which a worker dies. spent: CPU seconds of the stubs."""

    def __init__(self, run_dir: Path, workers: int, *, deaths: float, seed: int = 0, ahead: int | None = 1) -> None:
        self.size, self.ahead = workers, ahead
        self.deaths = 0
        self.spent = 0.0
        self._run_dir, self._mean = run_dir, deaths
        self._random = random.Random(seed)
        self._due: list[tuple[float, int, str, int]] = []  # time, order, worker, its life
        self._order, self._now = count(), 0.0
        self._journals: dict[str, Journal] = {}
        self._life: Counter[str] = Counter()
        self._jobs: dict[str, list[list[str]]] = {}
        self._lengths: dict[str, list[int]] = {}  # rows of the same jobs when they were given
        self._saved: Counter[str] = Counter()

    def start(self, worker: str) -> None:
        began = time.thread_time()
        self._life[worker] += 1
        self._jobs[worker] = []
        self._lengths[worker] = []
        self._saved[worker] = 0
        self._journals[worker] = Journal(self._run_dir)
        self._later(worker, START * self._random.random())
        self.spent += time.thread_time() - began

    def send(self, worker: str, jobs: Sequence[Job]) -> None:
        idle = not self._jobs[worker]
        self._jobs[worker] += [list(job.keys) for job in jobs]
        self._lengths[worker] += [len(job.keys) for job in jobs]
        if idle:
            self._later(worker, self._random.expovariate(1 / ROW))

    def release(self, worker: str) -> None:
        self._life[worker] += 1
        self._journals[worker].close()

    def events(self, seconds: float) -> Iterator[Event]:
        began = time.thread_time()
        happened: list[Event] = []
        while self._due and not happened:
            self._now, _, worker, life = heapq.heappop(self._due)
            if life == self._life[worker]:
                happened = self._next(worker)
        self.spent += time.thread_time() - began
        yield from happened

    def stop(self, seconds: float) -> None:
        for journal in self._journals.values():
            journal.close()

    def _next(self, worker: str) -> list[Event]:
        """Do what the worker does at this time: begin, die, or write a row."""
        jobs = self._jobs[worker]
        if not jobs:
            return [Ready(worker)]
        if self._random.random() < 1 / self._mean:
            return [self._die(worker, jobs[0][0])]
        self._write(worker, jobs[0].pop(0))
        shown = Shown(worker, Figures(cell="stub", saved=self._saved[worker], tokens=100 * self._saved[worker]))
        if jobs[0]:
            self._later(worker, self._random.expovariate(1 / ROW))
            return [shown] if self._random.random() < 0.1 else []
        jobs.pop(0)
        if jobs:
            self._later(worker, self._random.expovariate(1 / ROW))
        return [shown, Done(worker, self._lengths[worker].pop(0))]

    def _die(self, worker: str, key: str) -> Lost:
        self.deaths += 1
        journal = self._journals[worker]
        journal.close()
        if journal.segment is not None and self._random.random() < 0.3:
            with journal.segment.open("ab") as file:  # a record that the kill cut
                file.write(b'0badc0de {"kind":"row","row":{"row_key":"' + key.encode())
        return Lost(worker, "killed by SIGKILL")

    def _write(self, worker: str, key: str) -> None:
        self._journals[worker].append(row_of(key), output="an answer")
        self._saved[worker] += 1

    def _later(self, worker: str, seconds: float) -> None:
        heapq.heappush(self._due, (self._now + seconds, next(self._order), worker, self._life[worker]))


def row_of(key: str) -> dict[str, Any]:
    """Return a small row whose values depend on its key only."""
    named: dict[str, Any] = {"row_key": key, "task": "walk", "task_version": "1", "doc_id": key, "sample": 0}
    named |= {"method": "gkv", "budget": 64, "interval": 32, "model": "tiny", "seed": 0, "temperature": 0.6}
    return named | {"status": "ok", "score": float(int(key, 16) % 2), "output_tokens": int(key, 16) % 997}


def simulate(
    run_dir: Path, *, workers: int, rows: int, job: int, deaths: float, seed: int = 0, ahead: int | None = 1
) -> dict[str, float]:
    """Execute rows in jobs of this many rows; return counts, and the coordinator's CPU seconds and peak bytes."""
    run_dir.mkdir(parents=True, exist_ok=True)
    keys = [f"{number:032x}" for number in range(rows)]
    jobs = [Job(0, tuple(keys[first : first + job])) for first in range(0, rows, job)]
    executor = StubExecutor(run_dir, workers, deaths=deaths, seed=seed, ahead=ahead)
    began = time.thread_time()
    coordinator = Coordinator(
        executor,
        run_dir,
        before=0,
        progress=Progress(quiet=True),
        say=lambda text: None,
        labels=["walk gkv @64"],
        state=lambda: "saved rows are kept",
    )
    coordinator.run(jobs)
    spent = time.thread_time() - began - executor.spent
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    content = read_journal(run_dir)
    return {
        "workers": workers,
        "rows": rows,
        "jobs": len(jobs),
        "deaths": executor.deaths,
        "jobs again": coordinator.retried,
        "torn records": content.dropped,
        "lost": rows - len(content.done & set(keys)),
        "doubled": content.duplicates,
        "ms per job": 1000 * spent / len(jobs),
        "peak MB": peak / 1e6,
    }


def main() -> None:
    """Print the table of one simulation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--job", type=int, default=50, help="rows per job")
    parser.add_argument("--deaths", type=float, default=400, help="mean number of rows after which a worker dies")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = simulate(
            Path(folder) / "run",
            workers=given.workers,
            rows=given.rows,
            job=given.job,
            deaths=given.deaths,
            seed=given.seed,
        )
    print("| " + " | ".join(found) + " |")
    print("|" + " ---: |" * len(found))
    print(
        "| "
        + " | ".join(f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" for value in found.values())
        + " |"
    )


if __name__ == "__main__":
    main()
