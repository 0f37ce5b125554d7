"""Workers in processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.connection import Connection, Pipe

from kvbench.config import plugins
from kvbench.console import faults, signals
from kvbench.errors import KVBenchError, PluginError, SetupError
from kvbench.runner.jobs import Job
from kvbench.runner.workers.executor import Done, Event, Failed, Lost, Noticed, Order, Ready, Shown

VISIBLE = "CUDA_VISIBLE_DEVICES"


class LocalExecutor:
    """Workers in processes of this machine.

    devices: for each worker the value of CUDA_VISIBLE_DEVICES, or None to leave this variable as it is.
    """

    ahead: int | None = 1

    def __init__(self, order: Order, devices: Sequence[str | None]) -> None:
        self.size = len(devices)
        self._order, self._devices = order, devices
        self._links: dict[str, Connection] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        signals.at_end(self._kill)

    def start(self, worker: str) -> None:
        """Start the process of a worker; kill a former process of the same worker. worker: its number, from 1."""
        if (former := self._processes.pop(worker, None)) is not None:
            former.kill()
            former.wait()
        try:
            self._begin(worker, self._devices[int(worker) - 1])
        except OSError as error:
            raise SetupError(f"the process of worker {worker} cannot be started ({error.strerror}).") from error

    def _begin(self, worker: str, device: str | None) -> None:
        variables = {} if device is None else {VISIBLE: device}
        ours, theirs = Pipe()
        self._processes[worker] = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from {__name__} import main; main()", str(theirs.fileno()), worker],
            env=os.environ | variables,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,  # only the coordinator writes to stdout
            start_new_session=True,  # the terminal signals the coordinator only, which then ends its workers
        )
        theirs.close()
        self._links[worker] = ours
        ours.send(self._order)

    def send(self, worker: str, jobs: Sequence[Job]) -> None:
        with suppress(OSError, KeyError):  # the worker has died; `events` reports it
            self._links[worker].send(list(jobs))

    def release(self, worker: str) -> None:
        if worker in self._links:
            self._processes[worker].terminate()  # a worker that has jobs saves its rows first
            self._forget(worker)

    def events(self, seconds: float) -> Iterator[Event]:
        names = {link: worker for worker, link in self._links.items()}
        for link in connection.wait(list(names), seconds):
            yield from self._received(names[link])  # type: ignore[index]

    def _received(self, worker: str) -> Iterator[Event]:
        link = self._links[worker]
        try:
            while worker in self._links and link.poll():
                event = link.recv()
                if isinstance(event, Lost | Failed):
                    self._forget(worker)
                    yield event
                    return  # the caller may have started another worker of this name
                yield event
        except (EOFError, OSError):
            self._forget(worker)
            yield Lost(worker, _how_ended(self._processes[worker]))

    def _forget(self, worker: str) -> None:
        self._links.pop(worker).close()

    def stop(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for worker in list(self._links):
            self._processes[worker].terminate()
            self._forget(worker)
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        signals.not_at_end(self._kill)

    def _kill(self) -> None:
        for process in self._processes.values():
            process.kill()


def main() -> None:
    """Run a worker's process: execute the jobs that arrive through its link to the coordinator, until the link closes.
    The arguments of the process are the link's file descriptor and the worker's name."""
    number, worker = sys.argv[1:]
    link = Connection(int(number))
    with signals.handled():
        try:
            order = link.recv()
        except (signals.Signalled, EOFError, OSError):
            sys.exit(1)  # the coordinator ended before it sent the order
        try:
            from kvbench.runner.workers.worker import Worker

            here = Worker(order)
            link.send(Ready(worker))
            here.run(
                _arriving(link),
                show=lambda figures: link.send(Shown(worker, figures)),
                say=lambda text: link.send(Noticed(worker, text)),
                ended=lambda rows: link.send(Done(worker, rows)),
            )
        except (signals.Signalled, BrokenPipeError):
            sys.exit(1)  # the coordinator has ended this worker, or has died
        except KVBenchError as error:
            link.send(Failed(worker, str(error), error.exit_code, plugin=isinstance(error, PluginError)))
        except Exception as error:
            if signals.came():
                sys.exit(1)
            if faults.of_machine(error):
                link.send(Lost(worker, faults.first_line(error)))
            elif (fault := plugins.failure(error)) is not None:
                link.send(Failed(worker, fault, PluginError.exit_code, plugin=True))
            else:
                kind = f"{type(error).__name__}: {faults.words(error)}"
                text = f"internal error in a worker, please report it: {kind}. --workers 1 --debug shows where."
                link.send(Failed(worker, text, 1))


def _arriving(link: Connection) -> Iterator[Job]:
    while True:
        try:
            jobs = link.recv()
        except (EOFError, OSError):
            return
        yield from jobs


def _how_ended(process: subprocess.Popen[bytes]) -> str:
    """Return in words how a worker's process ended after it closed its link."""
    try:
        code = process.wait(1.0)
    except subprocess.TimeoutExpired:
        return "it closed its link"
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"its process ended with exit code {code}"
