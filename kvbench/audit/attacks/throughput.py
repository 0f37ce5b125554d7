"""Measures how fast the sandbox grades programs: many programs with one test each, and one program with many tests."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvbench.scoring.livecodebench import grade
from kvbench.scoring.sandbox.selection import Sandbox
from kvbench.scoring.sandbox.tiers import Tier

PROGRAMS, TESTS = 1000, 200
_PROGRAM = "a, b = map(int, input().split())\nprint(a + b)\n"


def measure(tier: Tier, programs: int = PROGRAMS, tests: int = TESTS) -> dict[str, Any]:
    """Measure how many seconds it takes to grade `programs` programs, and to grade one program on `tests` tests.

    Returns a dictionary with both times, the name of the tier, and the numbers of workers, programs and tests. The
    programs have one test each; every CPU core grades one program at a time. Raises BoxError if the sandbox fails, and
    RuntimeError if a right program is graded as wrong.
    """
    sandbox = Sandbox(tier, "")
    workers = len(os.sched_getaffinity(0))

    begun = time.monotonic()
    with ThreadPoolExecutor(workers) as pool:
        if not all(pool.map(lambda number: _passes(sandbox, [number]), range(programs))):
            raise RuntimeError("a right program was graded as wrong")
    spent = time.monotonic() - begun
    begun = time.monotonic()
    if not _passes(sandbox, list(range(tests))):
        raise RuntimeError("a right program was graded as wrong")
    whole = {"tier": tier.name, "workers": workers, "programs": programs, "programs_seconds": round(spent, 2)}
    return whole | {"tests": tests, "tests_seconds": round(time.monotonic() - begun, 2)}


def _passes(sandbox: Sandbox, numbers: list[int]) -> bool:
    inputs, outputs = [f"{n} {n + 1}\n" for n in numbers], [f"{2 * n + 1}\n" for n in numbers]
    grades = grade(_PROGRAM, inputs, outputs, None, sandbox=sandbox)
    return grades.lcb.passed and grades.native.passed
