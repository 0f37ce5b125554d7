"""Compute scores in other processes, each under a hard time limit.

A score that exceeds the time limit becomes `Score(value=None, note="timeout: ...")`; if the scoring process dies, the
note is ``"crashed: ..."``. No other score is affected. Two kinds of task are scored in the calling process, without the
time limit: a task with `cheap_score` is scored at once, in the caller's thread; a task that asks a judge is scored in a
pool of threads.

Why not a library's pool: `concurrent.futures` cannot kill one hung worker and continue. pebble 5.2 can, but (1) if the
kernel kills its idle workers to free memory, the pool takes no more work; (2) a hung worker outlives a killed parent;
(3) its `multiprocessing` children import the main module again, perhaps with torch; (4) they inherit every key in the
environment. `tests/scoring/test_pool.py` checks all four.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import re
import selectors
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from kvbench.console import signals
from kvbench.errors import SetupError
from kvbench.scoring.failure import failure
from kvbench.scoring.worker import HEADER, send, source_of
from kvbench.task import Doc, Output, Score, Task

JUDGES = 4  # threads; each sends one request to a judge at a time
_SECRET = re.compile("KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)  # variables that scoring processes do not get
START_SECONDS = 60.0  # time in which a process must start; enough for a cold start on a slow disk
FIRST_SECONDS = 30.0  # added to the limit of a process's first score, which imports sympy

_Job = tuple[Future[Score], Task, Doc, Output]


class ScorePool:
    """Up to `workers` scoring processes, started on demand, and `JUDGES` threads for tasks that ask a judge.

    The wall-clock limit of one score is `Task.patience`; the first score of a process gets `FIRST_SECONDS` more.
    """

    def __init__(self, workers: int = 1) -> None:
        self.workers = workers
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._waiting = 0
        self._lock = threading.Lock()
        self._judges = ThreadPoolExecutor(JUDGES, thread_name_prefix="kvbench-judge")
        self._alive: set[_Process] = set()
        self._closed = self._killed = False
        signals.at_end(self._kill)

    def submit(self, task: Task, doc: Doc, output: Output) -> Future[Score]:
        """Begin to score one output, and return a future of the score.

        The future's `result` raises SetupError if no scoring process starts, the judge refuses the key or a local judge
        cannot be used. It raises CancelledError if ``close(cancel=True)`` drops the output. If ``close(cancel=True)``
        kills the process that scores the output, the future gets no result. After `close`, this method raises
        RuntimeError.
        """
        future: Future[Score] = Future()
        if self._closed:
            raise RuntimeError("the scoring pool is closed")
        if task.cheap_score:
            try:
                future.set_result(task.score(doc, output))
            except Exception as error:
                future.set_result(Score(value=None, note=f"error: {failure(error)}"))
            return future
        if "judge" in task.needs:  # mostly waits for the judge, and needs the judge's key from the environment
            return self._judges.submit(_judge, task, doc, output)
        with self._lock:
            self._waiting += 1
            if len(self._threads) < min(self.workers, self._waiting):
                thread = threading.Thread(target=self._serve, name="kvbench-score", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._jobs.put((future, task, doc, output))
        return future

    def close(self, *, cancel: bool = False) -> None:
        """Wait for all scores. With `cancel`, instead drop waiting outputs and kill the scoring processes."""
        if self._closed:
            return
        self._closed = True
        while cancel:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                job[0].cancel()
        self._judges.shutdown(wait=not cancel, cancel_futures=cancel)
        if cancel:
            self._kill()
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        signals.not_at_end(self._kill)

    def _kill(self) -> None:
        self._killed = True
        for process in list(self._alive):
            process.kill()

    def __enter__(self) -> ScorePool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(cancel=kind is not None)

    def _serve(self) -> None:
        """Run one thread: send jobs to one process, and replace the process if it hangs or dies."""
        process: _Process | None = None
        while (job := self._jobs.get()) is not None:
            future, task, doc, output = job
            if future.set_running_or_notify_cancel():
                try:
                    process = process or _Process(self._alive)
                    score = process.score(task, doc, output)
                    if process.gone:
                        process = None
                        if self._killed:  # kvbench ended the process, the score did not crash: leave the row unscored
                            return
                    future.set_result(score)
                except BaseException as error:
                    if process is not None:
                        process.close()
                        process = None
                    if isinstance(error, SetupError) or not isinstance(error, Exception):
                        future.set_exception(error)
                    else:  # from the task's code, such as `patience`, or from a result that cannot be unpickled
                        future.set_result(Score(value=None, note=f"error: {failure(error)}"))
            with self._lock:
                self._waiting -= 1
        if process is not None:
            process.close()


def _judge(task: Task, doc: Doc, output: Output) -> Score:
    try:
        return task.score(doc, output)
    except SetupError:
        raise
    except Exception as error:
        return Score(value=None, status="judge_error", note=f"error: {failure(error)}")


def _does_not_start(command: list[str], why: str = "") -> SetupError:
    return SetupError(f"the scoring process does not start{why}. Run it to see why: {' '.join(command)}.")


class _Process:
    """One scoring process.

    It is in the set `alive` until it is closed; from then on, `gone` is True. A time-out or a crash closes it.
    """

    def __init__(self, alive: set[_Process]) -> None:
        self._among = alive
        env = {name: value for name, value in os.environ.items() if not _SECRET.search(name)}
        env |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        # -P: import nothing from the working directory.
        command = [sys.executable, "-P", "-m", "kvbench.scoring.worker"]
        pipe, quiet = subprocess.PIPE, subprocess.DEVNULL
        try:
            self._ready = selectors.DefaultSelector()
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=quiet, env=env)
        except OSError as error:  # such as too many processes or open files
            raise _does_not_start(command, f" ({error.strerror or error})") from error
        alive.add(self)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout.fileno()
        self._ready.register(self._out, selectors.EVENT_READ)
        self.gone, self._used = False, False
        try:
            started = self._answer(START_SECONDS)
        except (EOFError, TimeoutError):
            started = None
        if started != "ready":
            self.close()
            raise _does_not_start(command)

    def score(self, task: Task, doc: Doc, output: Output) -> Score:
        module = type(task).__module__
        file = getattr(sys.modules.get(module), "__file__", None)
        limit = task.patience(doc) + (0.0 if self._used else FIRST_SECONDS)
        try:
            job = (module, file, source_of(module), pickle.dumps((task, doc, output)), limit + 5)
        except Exception as error:
            note = f"error: the answer cannot be sent to a scoring process: {type(error).__name__}: {error}"
            return Score(value=None, note=note)
        self._used = True
        try:
            send(self._in, job)
            kind, result = self._answer(limit)
        except TimeoutError:
            self.close()
            return Score(value=None, note=f"timeout: no score within {limit:g} s")
        except (EOFError, OSError):
            self.close()
            return Score(value=None, note=f"crashed: the scoring process ended with code {self._process.returncode}")
        return result if kind == "score" else Score(value=None, note=f"error: {result}")

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self.gone = True
        self._process.kill()
        self._process.wait()
        self._among.discard(self)
        self._ready.close()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # closing flushes bytes that a dead process cannot take
                if stream is not None:
                    stream.close()

    def _answer(self, seconds: float) -> Any:
        """Return the next message from the process. Raises TimeoutError if no message comes within `seconds`, EOFError
        if the process ended."""
        (size,) = HEADER.unpack(self._read(HEADER.size, deadline := time.monotonic() + seconds))
        return pickle.loads(self._read(size, deadline))

    def _read(self, size: int, deadline: float) -> bytes:
        data = b""
        while len(data) < size:
            if not self._ready.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            chunk = os.read(self._out, size - len(data))
            if not chunk:
                raise EOFError
            data += chunk
        return data
