"""A lockdown as data: the arguments that start a box, and the steps by which a program's process gives up rights."""

from __future__ import annotations

import base64
import os
import platform
import secrets
import sys
from dataclasses import dataclass
from typing import Any

from kvbench.scoring.sandbox import interpreter, seccomp
from kvbench.scoring.sandbox.limits import Limits

NEEDED = "needed"  # label of arguments without which a box cannot start
FIRST_USER, USERS = 60000, 5000  # root runs programs as one of these uids
_MACHINES = {"arm64": "aarch64", "amd64": "x86_64"}

Step = tuple[str, Any]  # name and argument of a step of `kvbench.scoring.sandbox.inside.lockdown`


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a program is locked down: arguments of the command that starts its box, and steps inside its process."""

    outer: tuple[tuple[str, tuple[str, ...]], ...] = ()  # named arguments of the command that starts the box
    inner: tuple[Step, ...]  # steps of the child before it runs the program
    # Families of system calls that the filter allows: `exec` for binaries, `exec` and `CHILDREN` for compilers,
    # others only in tests.
    opened: frozenset[str] = frozenset()

    def arguments(self) -> list[str]:
        return [argument for _, group in self.outer for argument in group]

    def user(self) -> int | None:
        """Return the uid to which the program's process drops root; None if it keeps its user."""
        return next((value[0] for name, value in self.inner if name == "user"), None)

    def steps(self) -> list[list[Any]]:
        """Return the steps inside the program's process (`inner`) as JSON data for the driver. The step `seccomp` gets
        its system-call filter."""
        return [[name, _filter(self.opened) if name == "seccomp" else value] for name, value in self.inner]


def machine() -> str:
    """Return the kernel's name for this processor architecture."""
    name = platform.machine()
    return _MACHINES.get(name.lower(), name)


def limits(of: Limits, threads: int | None) -> list[Step]:
    """Return the steps that set resource limits.

    The step for processor time holds the placeholder 0, which the limit of each program run replaces. threads: the most
    threads that the user may run in all processes together; None: no such limit.
    """
    sizes = {"AS": of.memory, "STACK": of.stack, "CPU": 0, "FSIZE": of.file_bytes, "NOFILE": of.files, "CORE": 0}
    if threads is not None:
        sizes["NPROC"] = threads
    return [("limit", [name, size]) for name, size in sizes.items()]


def drop_root(shown: list[str]) -> list[Step]:
    """Return the step that drops root to a random uid that no user normally has; [] if kvbench does not run as root.

    Root is dropped because RLIMIT_NPROC does not bind root. shown: paths that the program must read. If other users
    cannot read these paths, the process keeps the capability to read all files.
    """
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return []
    return [("user", [FIRST_USER + secrets.randbelow(USERS), not interpreter.readable_by_others(shown)])]


def lock(*rules: Step) -> list[Step]:
    """Return the steps that follow the resource limits and the change of user. rules: the tier's own steps, which are
    inserted before the last two steps."""
    steps = ("seals", "session", "environment", "parent")
    return [*((name, None) for name in steps), *rules, ("descriptors", None), ("seccomp", None)]


def own_tasks() -> int:
    """Return how many threads this user already runs, in all processes; 0 outside Linux. RLIMIT_NPROC counts them
    beside the threads of the program in the sandbox."""
    if not sys.platform.startswith("linux"):
        return 0
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == os.geteuid():
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # the process has just ended
            continue
    return count


def _filter(opened: frozenset[str]) -> list[Any]:
    program, offsets = seccomp.build(machine(), opened)
    return [base64.b64encode(program).decode(), offsets]
