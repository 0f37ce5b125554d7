"""Measures how fast programs are graded: many programs with one test each, and one program with many tests.

measure(tier)       # {"tier": ..., "programs": 1000, "programs_seconds": ..., "tests": 200, "tests_seconds": ...}
"""

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
    """Return the seconds of both, with one program per core at a time. Raises BoxError, RuntimeError."""
    sandbox = Sandbox(tier, "")
    workers = len(os.sched_getaffinity(0))

    def one(number: int) -> bool:
        return _passes(sandbox, [number])

    begun = time.monotonic()
    with ThreadPoolExecutor(workers) as pool:
        if not all(pool.map(one, range(programs))):
            raise RuntimeError("a right program was graded as wrong")
    spent = time.monotonic() - begun
    begun = time.monotonic()
    if not _passes(sandbox, list(range(tests))):
        raise RuntimeError("a right program was graded as wrong")
    return {
        "tier": tier.name,
        "workers": workers,
        "programs": programs,
        "programs_seconds": round(spent, 2),
        "tests": tests,
        "tests_seconds": round(time.monotonic() - begun, 2),
    }


def _passes(sandbox: Sandbox, numbers: list[int]) -> bool:
    inputs, outputs = [f"{n} {n + 1}\n" for n in numbers], [f"{2 * n + 1}\n" for n in numbers]
    grades = grade(_PROGRAM, inputs, outputs, None, sandbox=sandbox)
    return grades.lcb.passed and grades.native.passed
