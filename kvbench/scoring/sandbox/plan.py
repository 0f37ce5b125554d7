"""Everything that stands between a program and the machine, as data: so that a test can leave out one part at a time.

plan = tier.plan(Limits())
plan.parts()                      # ["--unshare-net", ..., "limit AS", "user", ..., "seccomp", "seccomp sockets"]
plan.without("seccomp sockets")   # the self-test must refuse this one
"""

from __future__ import annotations

import base64
import dataclasses
import os
import platform
import secrets
import sys
from dataclasses import dataclass
from typing import Any

from kvbench.scoring.sandbox import interpreter, seccomp
from kvbench.scoring.sandbox.limits import Limits
from kvbench.scoring.sandbox.syscalls import FAMILIES

NEEDED = "needed"  # arguments without which there would be no box
FIRST_USER, USERS = 60000, 5000  # programs of root run as one of these
_MACHINES = {"arm64": "aarch64", "amd64": "x86_64"}

Step = tuple[str, Any]  # name and argument of a step of `kvbench.scoring.sandbox.inside.lockdown`


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a program is locked in.

    Attributes:
        outer: named groups of arguments of the command that makes the box.
        inner: the steps that the child takes before it runs the program.
        opened: families of system calls that are let through; none, but in tests.
    """

    outer: tuple[tuple[str, tuple[str, ...]], ...] = ()
    inner: tuple[Step, ...]
    opened: frozenset[str] = frozenset()

    def parts(self) -> list[str]:
        """A name for everything that can be left out."""
        names = [name for name, _ in self.outer if name != NEEDED] + [_label(step) for step in self.inner]
        if "seccomp" in names:
            foreign = [seccomp.FOREIGN] if machine() == "x86_64" else []
            names += [f"seccomp {family}" for family in (*FAMILIES, *foreign)]
        return names

    def without(self, part: str) -> Plan:
        """The same plan lacking one part."""
        if part.startswith("seccomp "):
            return dataclasses.replace(self, opened=self.opened | {part.removeprefix("seccomp ")})
        outer = tuple(group for group in self.outer if group[0] != part)
        inner = tuple(step for step in self.inner if _label(step) != part)
        assert (outer, inner) != (self.outer, self.inner), part
        return dataclasses.replace(self, outer=outer, inner=inner)

    def arguments(self) -> list[str]:
        return [argument for _, group in self.outer for argument in group]

    def steps(self) -> list[list[Any]]:
        """The steps as the driver takes them: plain data."""
        return [[name, _filter(self.opened) if name == "seccomp" else value] for name, value in self.inner]


def machine() -> str:
    """The kind of processor, by the kernel's name for it."""
    name = platform.machine()
    return _MACHINES.get(name.lower(), name)


def limits(given: Limits, threads: int | None) -> list[Step]:
    """Resource limits; `threads`: of the user as a whole. The time limit comes with each run."""
    sizes = {
        "AS": given.memory,
        "STACK": given.stack,
        "CPU": 0,
        "FSIZE": given.file_bytes,
        "NOFILE": given.files,
        "CORE": 0,
    }
    return [("limit", [name, size]) for name, size in (sizes | ({} if threads is None else {"NPROC": threads})).items()]


def drop_root(shown: list[str]) -> list[Step]:
    """Root becomes a user that nobody is, for that user alone is bound by the number of threads.

    `shown` is what the program must be able to read at its place; where it is private, one capability stays.
    """
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return []
    return [("user", [FIRST_USER + secrets.randbelow(USERS), not interpreter.readable_by_others(shown)])]


def lock(*rules: Step) -> list[Step]:
    """The steps after limits and user, with those of the tier before the last two."""
    steps = ("seals", "session", "environment", "parent")
    return [*((name, None) for name in steps), *rules, ("descriptors", None), ("seccomp", None)]


def own_tasks() -> int:
    """Processes and threads of this user, which a limit on their number counts too."""
    if not sys.platform.startswith("linux"):
        return 0
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == os.geteuid():
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # it has just ended
            continue
    return count


def _filter(opened: frozenset[str]) -> list[Any]:
    made = seccomp.build(machine(), opened)
    return [base64.b64encode(made.program).decode(), list(made.pid_offsets)]


def _label(step: Step) -> str:
    return f"limit {step[1][0]}" if step[0] == "limit" else step[0]
