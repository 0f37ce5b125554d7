"""Tiers of the sandbox that can be tried on this machine, one program in a box of theirs, and lockdowns without a part.

Tests omit one part at a time and check that the self-test notices the omission.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import textwrap
from typing import Any

import pytest

from kvbench.scoring.sandbox import Limits, Outcome, inside, seccomp
from kvbench.scoring.sandbox.box import Box
from kvbench.scoring.sandbox.plan import NEEDED, Plan, Step, machine
from kvbench.scoring.sandbox.syscalls import FAMILIES
from kvbench.scoring.sandbox.tiers import Bwrap, Landlock, Tier

LOCKED = [
    pytest.param(tier, id=tier.name, marks=pytest.mark.skipif(bool(tier.missing()), reason=tier.missing()))
    for tier in (Bwrap(), Landlock())
]


def links() -> bool:
    """Whether this machine's g++ can link a program statically."""
    if (compiler := shutil.which("g++")) is None:
        return False
    command = [compiler, "-static", "-x", "c++", "-", "-o", os.devnull]
    return subprocess.run(command, input=b"int main() {}", capture_output=True, check=False).returncode == 0


compiles = pytest.mark.skipif(not links(), reason="needs a g++ that links statically")


def run(
    tier: Tier, program: str, stdin: bytes = b"", *, seconds: float = 10.0, limits: Limits | None = None, **options: Any
) -> Outcome:
    """One program as a script."""
    with Box(tier, limits or Limits()) as box:
        box.load(inside.text("script"), textwrap.dedent(program), options)
        return box.run(stdin, seconds=seconds)


def parts(plan: Plan) -> list[str]:
    """The names of the parts that `without` can omit, such as "--unshare-net" and "limit AS".

    The arguments without which no box starts (labelled NEEDED) are not among them.
    """
    names = [name for name, _ in plan.outer if name != NEEDED] + [_label(step) for step in plan.inner]
    if "seccomp" in names:
        foreign = [seccomp.FOREIGN] if machine() == "x86_64" else []
        names += [f"seccomp {family}" for family in (*FAMILIES, *foreign)]
    return names


def without(plan: Plan, part: str) -> Plan:
    """A lockdown without the part of this name.

    A part such as "seccomp fork" refuses a family of system calls. Without that part, the filter allows the family.
    """
    if part.startswith("seccomp "):
        return dataclasses.replace(plan, opened=plan.opened | {part.removeprefix("seccomp ")})
    outer = tuple(group for group in plan.outer if group[0] != part)
    inner = tuple(step for step in plan.inner if _label(step) != part)
    assert (outer, inner) != (plan.outer, plan.inner), part
    return dataclasses.replace(plan, outer=outer, inner=inner)


def _label(step: Step) -> str:
    return f"limit {step[1][0]}" if step[0] == "limit" else step[0]
