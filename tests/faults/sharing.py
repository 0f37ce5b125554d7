"""Several processes share a run: shards side by side, and a worker that outlives its coordinator. F10, F11."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import psutil
from faults.stage import ROWS, RUN, Stage, scenario

PATIENCE = 120.0  # seconds for a worker to start on a busy machine


@scenario("F10")
def two_shards(stage: Stage) -> None:
    both = [stage.start(f"{RUN} --shard {number}/2") for number in (1, 2)]
    assert [command.end().code for command in both] == [0, 0]
    parts = [stage.rows(stage.folder / "results" / f"r1-{number}-of-2") for number in (1, 2)]
    assert sum(map(len, parts)) == ROWS
    assert not set(parts[0]["row_key"]) & set(parts[1]["row_key"])
    stage.done("join r1-1-of-2 r1-2-of-2 --run-name r1 -q")
    stage.check_final()


@scenario("F11")
def a_worker_wakes_up_late(stage: Stage) -> None:
    """Two workers are stopped, their coordinator is killed, and another process finishes the run. Then they wake up."""
    coordinator = stage.start(f"{RUN} --workers 2")
    segments = stage.run_dir / "journal"
    _wait(lambda: (segments.is_dir() and any(segments.iterdir())) or not coordinator.running())
    workers = [p for p in psutil.Process(coordinator.pid).children() if "kvbench.runner.workers" in str(p.cmdline())]
    assert workers
    for worker in workers:
        os.kill(worker.pid, signal.SIGSTOP)
    assert coordinator.kill().code == -signal.SIGKILL
    try:
        stage.done("run --resume r1 -q")
        stage.check_final()
    finally:
        for worker in workers:
            os.kill(worker.pid, signal.SIGCONT)
    _wait(lambda: not any(worker.is_running() and worker.status() != "zombie" for worker in workers))
    stage.done("repair r1")
    assert len(stage.rows()) == ROWS
    stage.check_final()


def _wait(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)
