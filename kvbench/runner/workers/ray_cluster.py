"""Workers in actors of a Ray cluster, one worker per actor.

An actor reserves one GPU in Ray, if the run uses GPUs, and starts a worker's process on its machine with a
`LocalExecutor`. The process is a child of the actor, so that kvbench's own handling of signals applies: the worker
saves its rows when it is asked to end. Only jobs, figures and messages pass through Ray; rows go to the run's folder,
which every machine must see.
"""

from __future__ import annotations

import importlib
import os
import re
import secrets
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kvbench.console import faults, signals
from kvbench.errors import SetupError, UserError, bare, counted, quote
from kvbench.runner.jobs import Job
from kvbench.runner.workers.executor import Event, Failed, Lost, Order
from kvbench.runner.workers.local import LocalExecutor

ADDRESS = "RAY_ADDRESS"
OWN = "local"  # the address with which Ray starts a new cluster on this machine
THREADS = "OMP_NUM_THREADS"
CARRIED = (THREADS, "KVBENCH_DATA")  # the command's environment variables that its workers get
STORE = 100_000_000  # bytes of the object store of a new cluster; jobs and figures are small
ALL = "^"  # a pattern that every line of Ray's messages matches
WAIT = 0.5  # seconds that an actor waits for an event of its worker
ENDING = 1.0  # seconds for an actor's answer after its worker has ended
FIRST = "1"  # the name of an actor's only worker


class Actor:
    """Runs one worker in a child process. Ray creates the actor on a machine of its choice.

    folder: the coordinator's current folder, to which relative paths in the run's settings refer. variables:
    environment variables of the worker.
    """

    def __init__(self, order: Order, folder: str, variables: Mapping[str, str]) -> None:
        if os.path.isdir(folder):
            os.chdir(folder)
        os.environ.pop(THREADS, None)  # Ray sets it to the number of CPUs that the actor reserved
        os.environ.update(variables)
        self._workers = LocalExecutor(order, [None])
        self._workers.start(FIRST)

    def send(self, jobs: Sequence[Job]) -> None:
        self._workers.send(FIRST, jobs)

    def said(self) -> list[Event]:
        """Return the worker's events since the last call. Waits up to `WAIT` seconds for the first event."""
        return list(self._workers.events(WAIT))

    def stop(self, seconds: float) -> None:
        self._workers.stop(seconds)


class RayExecutor:
    """Workers in actors of a Ray cluster.

    address: the cluster's address, as `ray.init` takes it. None: the address in RAY_ADDRESS; without this variable, a
    new cluster on this machine, which ends with the run. workers: the number of workers. None: one per GPU that the
    cluster has now; in a run without GPUs, one per machine. gpus: reserve a GPU per worker. Raises SetupError if Ray
    does not answer. With `gpus`, raises UserError if a new cluster has too few GPUs, and SetupError if an existing
    cluster has no GPU and `workers` is None.
    """

    ahead: int | None = 1

    def __init__(self, order: Order, *, address: str | None, workers: int | None, gpus: bool) -> None:
        self._order = order
        self._actors: dict[str, Any] = {}
        self._asked: dict[Any, str] = {}  # pending call of an actor's method `said` -> the worker's name
        where = address or os.environ.get(ADDRESS) or OWN
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ALL)  # the coordinator reports failures itself
        if where == OWN:
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray leaves one in the home folder
        self._ray = importlib.import_module("ray")  # reads these variables
        self._errors = self._ray.exceptions.RayError
        self._guest = self._ray.is_initialized()
        self._own = not self._guest and where == OWN
        if not self._guest:
            _connect(self._ray, where, 1 if gpus else workers or 1)
        try:
            self.size = self._size(workers, gpus)
        except BaseException:
            self._leave()
            raise
        options = {"num_cpus": 1, "num_gpus": int(gpus), "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        self._make = self._ray.remote(Actor).options(**options).remote

    def start(self, worker: str) -> None:
        """Ask Ray for an actor, which starts when the cluster has room for it."""
        carried = {name: value for name, value in os.environ.items() if name in CARRIED}
        self._actors[worker] = self._make(self._order, os.getcwd(), carried)

    def send(self, worker: str, jobs: Sequence[Job]) -> None:
        if worker in self._actors:
            self._actors[worker].send.remote(list(jobs))

    def release(self, worker: str) -> None:
        """End the actor, also one that still waits for room in the cluster. Its child process notices this and ends."""
        self._asked = {answer: asked for answer, asked in self._asked.items() if asked != worker}
        if worker in self._actors:
            self._ray.kill(self._actors.pop(worker))  # frees its GPU

    def events(self, seconds: float) -> Iterator[Event]:
        silent = self._actors.keys() - self._asked.values()
        self._asked |= {self._actors[worker].said.remote(): worker for worker in silent}
        if not self._asked:
            time.sleep(seconds)
            return
        ready, _ = self._ray.wait(list(self._asked), num_returns=1, timeout=seconds)
        if ready:
            ready, _ = self._ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0)
        for answer in ready:
            yield from self._said(self._asked.pop(answer), answer)

    def _said(self, worker: str, answer: Any) -> Iterator[Event]:
        if worker not in self._actors:
            return
        try:
            events = self._ray.get(answer)
        except self._errors as error:
            events = [Lost(worker, _why(error))]
        for event in events:
            if isinstance(event, Lost | Failed):
                self.release(worker)
            yield replace(event, worker=worker)

    def stop(self, seconds: float) -> None:
        """Let all actors end their workers at the same time, then end the actors. Also leave the cluster, unless this
        process was connected to Ray before the run; a cluster that the run itself started ends then."""
        with suppress(self._errors):
            ends = [actor.stop.remote(seconds) for actor in self._actors.values()]
            if ends:
                self._ray.wait(ends, num_returns=len(ends), timeout=seconds + WAIT + ENDING)
            for actor in self._actors.values():
                self._ray.kill(actor)
        self._actors.clear()
        self._leave()

    def _leave(self) -> None:
        if not self._guest:
            self._ray.shutdown()

    def _size(self, workers: int | None, gpus: bool) -> int:
        """Return the number of workers; if the user gave none, it depends on the cluster's present size."""
        if not gpus:
            return workers or sum(node["Alive"] for node in self._ray.nodes())
        count = int(self._ray.cluster_resources().get("GPU", 0))
        if self._own and count < (workers or 1):
            asked = f"--workers {workers}: " if workers else ""
            raise UserError(f"{asked}this machine has {counted(count, 'GPU')}, and each worker needs a GPU.")
        if not (workers or count):
            raise SetupError("the Ray cluster has no GPU now. Give --workers N to wait for N GPUs.")
        return workers or count


def _connect(ray: Any, address: str, cpus: int) -> None:
    """Connect to a cluster, or start one on this machine. cpus: the least number of CPUs to declare for a new
    cluster."""
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == OWN:
        options |= {
            "include_dashboard": False,
            "object_store_memory": STORE,
            "num_cpus": max(os.cpu_count() or 1, cpus),
        }
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, **options)
    except SystemExit:  # Ray's own handler of SIGTERM
        raise signals.Signalled(signal.SIGTERM) from None
    except Exception as error:
        where = "does not start on this machine" if address == OWN else f"does not answer at {quote(address)}"
        raise SetupError(f"Ray {where} ({bare(_why(error))}).") from error
    finally:
        signal.signal(signal.SIGTERM, before)


def _why(error: Exception) -> str:
    """Return the cause from the message of a Ray error: the line that names an exception, otherwise the last line."""
    lines = [line for line in faults.words(error).splitlines() if line[:1].strip()]
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return (named or lines)[-1].partition(". ")[0]
