"""Start a box and run programs in it. This is the trusted side, outside the box; it talks to the driver inside.

`Box.load` sends a harness (`kvbench.scoring.sandbox.inside`) and a program. Then `run` runs the program once in a new
process, or `open` starts the program in a process that answers requests (`ask`).

A request to the driver consists of these parts: kind, wall-clock limit in ms, CPU limit in seconds, output limit in
bytes, length of the data, data. For the kinds see `kvbench.scoring.sandbox.inside.driver`. A reply has a state, the
exit code, wall-clock time, peak memory, and three byte strings: the answer, standard output and standard error. The
strings' lengths are checked before the strings are read.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import select
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvbench.scoring.sandbox import inside
from kvbench.scoring.sandbox.cleanup import remove_tree
from kvbench.scoring.sandbox.limits import Limits
from kvbench.scoring.sandbox.plan import Plan
from kvbench.scoring.sandbox.tiers import Tier

Status = Literal["ok", "answered", "runtime_error", "time_limit", "memory_limit", "output_limit"]

START_SECONDS = 60.0  # time in which a box must start; enough for a slow disk or a container
GRACE_SECONDS = 15.0  # time after the program's time limit in which the driver must reply
_STATES: dict[bytes, Status] = {b"A": "answered", b"X": "ok", b"S": "runtime_error", b"T": "time_limit"}
_STATES |= {b"O": "output_limit", b"C": "ok"}
_MEMORY_CODE = 86  # exit code of a harness that ran out of memory
_stack_lock = threading.Lock()


class BoxError(Exception):
    """A failure of the box, not of the program in it.

    The box did not start, its lockdown failed, or its driver died or does not answer.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one run of a program, or one request to it, ended.

    code: exit code or signal number. answer: the reply to a request; "" for a run. seconds: wall-clock time. peak: most
    bytes of memory; 0 while the process still runs.
    """

    status: Status
    code: int = 0
    seconds: float = 0.0
    peak: int = 0
    answer: bytes = field(default=b"", repr=False)
    stdout: bytes = field(default=b"", repr=False)
    stderr: bytes = field(default=b"", repr=False)


class Box:
    """A started box. Raises BoxError if it cannot be started.

    Every method but `close` raises BoxError if the box fails.

    folder: the program's working directory, which the box deletes at its end; "": the tier's own.
    """

    def __init__(
        self,
        tier: Tier,
        limits: Limits,
        *,
        packages: Sequence[str] = (),
        plan: Plan | None = None,
        folder: str = "",
    ) -> None:
        self.tier, self.limits = tier, limits
        plan = plan or tier.plan(limits, packages)
        self._held = contextlib.ExitStack()  # closes the file of errors and deletes the folder
        try:
            self._folder = folder or tier.folder()
            if self._folder:
                self._held.callback(remove_tree, self._folder)
            self._errors = self._held.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
            if folder and (user := plan.user()) is not None:
                os.chown(folder, user, os.getegid())
                os.chmod(folder, 0o710)  # the driver, which keeps root's group, must enter the folder
            with _stack(limits.stack):
                self._process = subprocess.Popen(
                    tier.command(plan),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors,
                    env=tier.environment(),
                    cwd="/",
                    start_new_session=True,
                )
        except OSError as error:
            self._held.close()
            raise BoxError(f"a box of tier {tier.name} cannot be started: {error.strerror or error}") from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        config = {"steps": plan.steps(), "packages": tier.packages(packages), "folder": self._folder or "/"}
        try:
            self._talk(b"C", json.dumps(config).encode(), START_SECONDS)
        except BoxError:
            self.close()
            raise

    def load(self, harness: str, program: str, options: Mapping[str, Any] | None = None) -> None:
        """Send the driver the harness and the program for the runs that follow. options: the argument of the harness's
        function `setup`."""
        code = inside.sent(harness, "harness.py", self.tier.same_python)
        message = {"harness": code, "program": program, "options": dict(options or {})}
        self._talk(b"L", json.dumps(message).encode(), START_SECONDS)

    def run(self, stdin: bytes = b"", *, seconds: float, output: int | None = None) -> Outcome:
        """Run the program once, to its end. seconds: limit of wall-clock time. The program may print `output` or
        `Limits.output` bytes, whichever is more."""
        return self._talk(b"N", stdin, seconds, cpu=math.ceil(seconds) + 1, output=output)

    def open(self, *, seconds: float, total: float) -> Outcome:
        """Start the program in a process that answers requests (`ask`). seconds: limit of wall-clock time for the
        start. total: limit of processor time of the process, in seconds."""
        return self._talk(b"O", b"", seconds, cpu=math.ceil(total) + 1)

    def ask(self, question: bytes, *, seconds: float, output: int | None = None) -> Outcome:
        """Send a request to the open process; any status but "answered" means that the process has ended."""
        return self._talk(b"A", question, seconds, output=output)

    def close_program(self) -> Outcome:
        """End the open process. The outcome has the process's peak memory, or 0 if the process had ended before."""
        return self._talk(b"C", b"", 0.0)

    def close(self) -> None:
        """End the box and every process in it."""
        process = self._process
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()
        try:
            process.wait(1.0)  # the driver ends when its input closes
        except subprocess.TimeoutExpired:
            self.tier.stop(process)
            process.wait()
        self._held.close()

    def __enter__(self) -> Box:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _talk(self, kind: bytes, data: bytes, seconds: float, *, cpu: int = 0, output: int | None = None) -> Outcome:
        limit = max(self.limits.output, output or 0)
        deadline = time.monotonic() + seconds + GRACE_SECONDS
        head = inside.REQUEST.pack(kind, math.ceil(1000 * seconds), cpu, limit, len(data))
        self._write(head + data, deadline)
        state, code, spent, peak, *sizes = inside.REPLY.unpack(self._read(inside.REPLY.size, deadline))
        if max(sizes) > limit + (1 << 17):
            raise BoxError("kvbench's process in the box announces a reply with more bytes than the output limit")
        answer, out, err = (self._read(size, deadline) for size in sizes)
        if state == b"F":
            raise BoxError(err.decode(errors="replace") or "the driver does not know the request")
        status = "ok" if state == b"R" else _STATES[state]
        if state == b"X" and code != 0:
            status = "memory_limit" if code == _MEMORY_CODE else "runtime_error"
        return Outcome(
            status=status, code=code, seconds=spent / 1000, peak=1024 * peak, answer=answer, stdout=out, stderr=err
        )

    def _write(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            if not select.select([], [self._in], [], max(0.0, deadline - time.monotonic()))[1]:
                raise BoxError("kvbench's process in the box does not read requests")
            try:
                view = view[os.write(self._in, view) :]
            except OSError:
                raise BoxError(self._why()) from None

    def _read(self, size: int, deadline: float) -> bytes:
        parts = []
        while size:
            if not select.select([self._out], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise BoxError("kvbench's process in the box does not answer in time")
            chunk = os.read(self._out, min(size, 1 << 20))
            if not chunk:
                raise BoxError(self._why())
            parts.append(chunk)
            size -= len(chunk)
        return b"".join(parts)

    def _why(self) -> str:
        """Return why the driver ended: the last line of the box's standard error or, without a line, the exit code."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._errors.seek(0)
        lines = self._errors.read(1 << 16).decode(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else f"the driver ended (code {self._process.poll()})"


@contextlib.contextmanager
def _stack(size: int) -> Iterator[None]:
    """Set the limit of this process's stack to `size` bytes inside the ``with`` block, which starts a child process.
    The child inherits the limit. The kernel places the child's stack at the start, so a later limit would not help."""
    with _stack_lock:
        soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
        wanted = size if hard == resource.RLIM_INFINITY else min(size, hard)
        resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))
