"""Workers in processes of this machine, one per GPU or as many as the user asks for."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

from kvbench.console import faults, signals
from kvbench.errors import KVBenchError
from kvbench.runner.jobs import Job
from kvbench.runner.workers.executor import Done, Event, Failed, Lost, Noticed, Order, Ready, Shown

VISIBLE = "CUDA_VISIBLE_DEVICES"


class LocalExecutor:
    """Workers in processes of this machine.

    devices: for each worker the value of CUDA_VISIBLE_DEVICES, or None to leave this variable as it is.
    """

    name: str = "local"
    ahead: int | None = 1

    def __init__(self, order: Order, devices: Sequence[str | None]) -> None:
        self.size = len(devices)
        self._order, self._devices = order, devices
        self._alive: dict[str, tuple[Any, Connection]] = {}
        signals.at_end(self._kill)

    def start(self, worker: str) -> None:
        """Start the process of a worker. worker: its number, from 1."""
        device = self._devices[int(worker) - 1]
        order = self._order if device is None else replace(self._order, variables={VISIBLE: device})
        fresh = multiprocessing.get_context("spawn")  # CUDA does not work in forked processes
        ours, theirs = fresh.Pipe()
        process = fresh.Process(
            target=serve, args=(order, worker, theirs), name=f"kvbench-worker-{worker}", daemon=True
        )
        process.start()
        theirs.close()
        self._alive[worker] = (process, ours)

    def send(self, worker: str, jobs: Sequence[Job]) -> None:
        if worker in self._alive:
            try:
                self._alive[worker][1].send(list(jobs))
            except OSError:
                return  # it has died; `events` says so

    def events(self, seconds: float) -> Iterator[Event]:
        names = {link: worker for worker, (_, link) in self._alive.items()}
        for link in connection.wait(list(names), seconds):
            yield from self._received(names[link])  # type: ignore[index]

    def _received(self, worker: str) -> Iterator[Event]:
        process, link = self._alive[worker]
        try:
            while link.poll():
                event = link.recv()
                if isinstance(event, Lost | Failed):
                    self._forget(worker)
                yield event
                if worker not in self._alive:
                    return
        except (EOFError, OSError):
            process.join(1.0)
            self._forget(worker)
            yield Lost(worker, _how_ended(process.exitcode))

    def _forget(self, worker: str) -> None:
        _, link = self._alive.pop(worker)
        link.close()

    def stop(self, seconds: float) -> None:
        """Close the links, upon which an idle worker ends; ask the others to save their rows and end."""
        deadline = time.monotonic() + seconds
        processes = [process for process, _ in self._alive.values()]
        for worker in list(self._alive):
            self._alive[worker][0].terminate()
            self._forget(worker)
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        signals.not_at_end(self._kill)

    def _kill(self) -> None:
        for process, _ in self._alive.values():
            process.kill()


def serve(order: Order, worker: str, link: Connection) -> None:
    """Execute the jobs that arrive through the link, until it closes. The main function of a worker's process."""
    with signals.handled():
        try:
            from kvbench.runner.workers.worker import Worker

            here = Worker(order)
            link.send(Ready(worker))
            here.run(
                _arriving(link),
                show=lambda figures: link.send(Shown(worker, figures)),
                say=lambda text: link.send(Noticed(worker, text)),
                ended=lambda: link.send(Done(worker)),
            )
        except (signals.Signalled, BrokenPipeError):
            sys.exit(1)  # the coordinator asked for this, or has died
        except KVBenchError as error:
            link.send(Failed(worker, str(error), error.exit_code))
        except Exception as error:
            if not (faults.out_of_memory(error) or faults.device_failed(error)):
                traceback.print_exc()
            link.send(Lost(worker, faults.first_line(error)))


def _arriving(link: Connection) -> Iterator[Job]:
    while True:
        try:
            jobs = link.recv()
        except (EOFError, OSError):
            return
        yield from jobs


def _how_ended(code: int | None) -> str:
    """Return how a process ended. code: its exit code; negative: the number of the signal that killed it."""
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"its process ended with exit code {code}"
