"""The child: the process that is locked down and runs a program.

`Child` controls it from the driver, which is in the box too. The functions from `_become` on run within the child.
"""

import fcntl
import gc
import os
import select
import signal
import struct
import sys
import time
from typing import Any

import lockdown

REPLY = struct.Struct(">cIIIIII")  # state, code, ms, peak KiB, bytes of answer, of stdout, of stderr
LENGTH = struct.Struct(">I")
ASK, TELL, STATUS = 3, 4, lockdown.STATUS  # descriptors of a child: requests, answers, result of the lockdown
LOCKED = b"locked"
ERRORS = 65536  # bytes of stderr that are kept
FAILED = 70  # exit code when the lockdown, not the program, went wrong


class Child:
    """A forked process with its pipes.

    box: the `Driver`, which has the lockdown's steps, harness and program. stdin: content of the program's standard
    input. cpu: limit of processor time in seconds. talks: whether the process answers requests on two more pipes;
    otherwise it runs once, to its end.
    """

    def __init__(self, box: Any, stdin: bytes, cpu: int, talks: bool) -> None:
        source = lockdown.sealed(stdin, box.seals)
        pipes = {name: os.pipe() for name in ("out", "err", "ask", "tell", "status")}
        self.pid = os.fork()
        if self.pid == 0:
            try:
                mine = [pipes["out"][1], pipes["err"][1], pipes["ask"][0], pipes["tell"][1], pipes["status"][1]]
                _become(box, [source, *mine], cpu, talks)
            finally:
                os._exit(FAILED)
        os.close(source)
        for name, (reads, writes) in pipes.items():
            os.close(reads if name == "ask" else writes)
        self.asks = pipes["ask"][1]
        self.reads = {pipes[name][0]: name for name in ("out", "err", "tell", "status")}
        self.data = {name: bytearray() for name in ("out", "err", "tell", "status")}
        for fd in (self.asks, *self.reads):
            os.set_blocking(fd, False)
        self.cpu, self.talks, self.ended = cpu, talks, False
        try:
            self.life: int | None = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # without pidfd, `wait` polls the process every 10 ms
            self.life = None

    def wait(self, question: bytes, wall: int, limit: int) -> bytes:
        """Send the process a request, wait at most `wall` ms until it answers or ends, and return the driver's reply.
        Kill the process if it does not answer in time, or if one of its streams holds more than `limit` bytes."""
        begun = time.monotonic()
        deadline = begun + wall / 1000
        poll = select.poll()
        for fd in (*self.reads, *((self.life,) if self.life is not None else ())):
            poll.register(fd, select.POLLIN)
        if question:
            poll.register(self.asks, select.POLLOUT)
        unsent, over = memoryview(question), False
        while not over:
            left = deadline - time.monotonic()
            if left <= 0:
                return self.end(b"T", begun, limit)
            for fd, _ in poll.poll(1000 * (left if self.life is not None else min(left, 0.01))):
                if fd == self.life:
                    over = True
                elif fd == self.asks:
                    unsent = _send(fd, unsent)
                    if not unsent:
                        poll.unregister(fd)
                elif not self._take(fd):
                    poll.unregister(fd)
            if self.life is None:
                over = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            if over:
                self._drain(limit)
            told = self.data["tell"]
            size = LENGTH.unpack_from(told)[0] if len(told) >= LENGTH.size else 0
            if max(size, *(len(self.data[name]) for name in ("out", "err", "tell"))) > limit + LENGTH.size:
                return self.end(b"O", begun, limit)
            if self.talks and len(told) >= LENGTH.size + size and len(told) >= LENGTH.size:
                answer = bytes(told[LENGTH.size : LENGTH.size + size])
                del told[: LENGTH.size + size]
                return self._reply(b"A", 0, begun, 0, limit, answer)
        return self.end(b"X", begun, limit)

    def end(self, state: bytes, begun: float, limit: int) -> bytes:
        """Kill the process and return the driver's reply. state: why the process ends (X by itself, T time limit, O
        output limit, C closed). begun: when the request began, in seconds. limit: most bytes of each stream."""
        for kill in (os.killpg, os.kill):  # its whole process group, then the process
            try:
                kill(self.pid, signal.SIGKILL)
            except OSError:
                continue
        _, status, used = os.wait4(self.pid, 0)
        for fd in (self.asks, self.life, *self.reads):
            if fd is not None:
                os.close(fd)
        self.ended = True
        code = os.waitstatus_to_exitcode(status)
        if state == b"X" and self.data["status"] != LOCKED:
            state = b"F"
        elif state == b"X" and code < 0:
            spent = used.ru_utime + used.ru_stime >= self.cpu
            state = b"T" if -code == signal.SIGXCPU or (-code == signal.SIGKILL and spent) else b"S"
            state = b"O" if -code == signal.SIGXFSZ else state
        peak = used.ru_maxrss if lockdown.LINUX else used.ru_maxrss // 1024
        return self._reply(state, abs(code), begun, peak, limit, b"")

    def _reply(self, state: bytes, code: int, begun: float, peak: int, limit: int, answer: bytes) -> bytes:
        out, err = bytes(self.data["out"][:limit]), bytes(self.data["err"][: min(limit, ERRORS)])
        if state == b"F":
            err = bytes(self.data["status"])
        self.data["out"].clear()
        self.data["err"].clear()
        spent = int(1000 * (time.monotonic() - begun))
        return REPLY.pack(state, code, spent, peak, len(answer), len(out), len(err)) + answer + out + err

    def _take(self, fd: int) -> bool:
        """Read the bytes that a pipe holds now; return False at its end."""
        try:
            chunk = os.read(fd, 1 << 16)
        except BlockingIOError:
            return True
        if not chunk:
            os.close(fd)
            del self.reads[fd]
            return False
        self.data[self.reads[fd]] += chunk
        return True

    def _drain(self, limit: int) -> None:
        """Read the rest of a dead process's pipes, without waiting for their end: grandchildren may hold them open.
        limit: read no more from a pipe that has given more bytes than this."""
        for fd, name in list(self.reads.items()):
            before = -1
            while fd in self.reads and before < len(self.data[name]) <= limit:
                before = len(self.data[name])
                self._take(fd)


def _send(fd: int, data: memoryview) -> memoryview:
    """Write to a pipe without waiting; return the bytes not yet written. If the pipe has no reader, return no bytes."""
    try:
        return data[os.write(fd, data) :]
    except BlockingIOError:
        return data
    except OSError:
        return data[:0]


# --- within the child -------------------------------------------------------------------------------------------------


def _become(box: Any, sources: list[int], cpu: int, talks: bool) -> None:
    """Inside the forked process: set up its descriptors, lock it down, and run the harness. Does not return. box, cpu,
    talks: see `Child`. sources: the descriptors that become 0 to 5: standard streams, ASK, TELL and STATUS."""
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, 32) for fd in sources]
    for place, fd in enumerate(moved):
        os.dup2(fd, place)
        os.close(fd)
    name = ""
    try:
        for name, value in box.steps:
            if name in lockdown.STEPS:
                lockdown.STEPS[name](["CPU", cpu] if name == "limit" and value[0] == "CPU" else value)
    except BaseException as error:
        os.write(STATUS, f"lockdown step {name} failed: {error}".encode()[:500])
        os._exit(FAILED)
    os.write(STATUS, LOCKED)
    os.close(STATUS)
    if not talks:
        os.close(ASK)
        os.close(TELL)
    for place, (name, mode, size) in enumerate((("stdin", "r", -1), ("stdout", "w", -1), ("stderr", "w", 1))):
        stream = open(place, mode, size, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = ["program.py"]
    for part in ("lockdown", "child", "driver"):
        del sys.modules[part]
    gc.enable()
    os._exit(box.harness["main"](box.program, ask, tell))


def ask() -> bytes | None:
    """Return the next request from outside the box, or None when there are no more."""
    head = read(ASK, LENGTH.size)
    return read(ASK, *LENGTH.unpack(head)) if head else None


def tell(answer: bytes) -> None:
    """Send an answer out of the box. The first answer of a process says that the harness is ready for requests."""
    view = memoryview(LENGTH.pack(len(answer)) + answer)
    while view:
        view = view[os.write(TELL, view) :]


def read(fd: int, size: int) -> bytes | None:
    """Read exactly `size` bytes; return None if the input ends before."""
    parts = []
    while size:
        chunk = os.read(fd, min(size, 1 << 20))
        if not chunk:
            return None
        parts.append(chunk)
        size -= len(chunk)
    return b"".join(parts)
