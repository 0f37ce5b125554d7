"""The first program in the box: it forks, lets the child lock itself down and run a program, and reports the output.

The driver itself is not locked down. It never runs a program itself. A harness (trusted text, loaded before the fork)
runs the program in the child, after every step of the lockdown has worked. The child has no descriptor of the driver,
and cannot signal, trace or address it, except in the tier "none", which does not isolate. The trusted side is
`kvbench.scoring.sandbox.box`, which documents requests and replies; they carry bytes and numbers, never objects.
"""

import _thread
import gc
import json
import os
import signal
import struct
import sys
import time
from collections.abc import Callable
from types import CodeType
from typing import Any

import child
import lockdown

REQUEST = struct.Struct(">cIIII")  # kind, wall ms, CPU s, output limit, bytes that follow
DONE = child.REPLY.pack(b"R", 0, 0, 0, 0, 0, 0)
THREAD_STACK = 8 << 20  # bytes; a C library's default would be the stack limit, which is far larger


class Driver:
    """The driver's state: lockdown steps, harness and program (all sent from outside), and the open child, if any."""

    def __init__(self, config: dict[str, Any], read: Callable[[str, str], CodeType]) -> None:
        self.read = read
        self.steps = config["steps"]
        self.seals = any(name == "seals" for name, _ in self.steps)
        self.program = ""
        self.harness: dict[str, Any] = {}
        self.child: child.Child | None = None
        packages = lockdown.Packages()
        for name, value in self.steps:
            if name == "landlock":
                lockdown.make_ruleset(value)
        for name, folder in config["packages"]:
            packages.add(name, folder)
        sys.meta_path.append(packages)
        os.chdir(config["folder"])

    def answer(self, kind: bytes, wall: int, cpu: int, limit: int, data: bytes) -> bytes:
        """Carry out a request and return the reply.

        kind: L load a program, N run it once, O open a process that runs it, A ask this process, C close it. wall:
        limit in ms. cpu: limit in seconds of processor time. limit: most bytes of output.
        """
        if kind == b"L":
            told = json.loads(data)
            self.program, self.harness = told["program"], {"__name__": "harness"}
            exec(self.read(told["harness"], "harness.py"), self.harness)
            self.harness["setup"](told["options"])
            gc.freeze()
            return DONE
        if kind == b"A" and self.child is not None:
            return self._wait(self.child, child.LENGTH.pack(len(data)) + data, wall, limit)
        closed = b"" if self.child is None else self.child.end(b"C", time.monotonic(), limit)
        self.child = None
        if kind in (b"N", b"O"):
            return self._wait(child.Child(self, data, cpu, kind == b"O"), b"", wall, limit)
        return closed or DONE

    def _wait(self, process: child.Child, question: bytes, wall: int, limit: int) -> bytes:
        reply = process.wait(question, wall, limit)
        self.child = None if process.ended else process
        return reply


def main(read: Callable[[str, str], CodeType]) -> None:
    """Answer requests until the input ends. read: turns a source text, and a name for tracebacks, into code."""
    incoming, outgoing = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    if lockdown.LINUX:
        lockdown.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the driver dies with the trusted side
        lockdown.prctl(4, 0)  # PR_SET_DUMPABLE, also of children: /proc shows nothing of them to their own user
    _thread.stack_size(THREAD_STACK)
    driver = None
    while head := child.read(incoming, REQUEST.size):
        kind, wall, cpu, limit, size = REQUEST.unpack(head)
        data = child.read(incoming, size)
        if data is None:
            return
        if driver is None:
            driver, reply = Driver(json.loads(data), read), DONE
        else:
            reply = driver.answer(kind, wall, cpu, limit, data)
        view = memoryview(reply)
        while view:
            view = view[os.write(outgoing, view) :]
