"""Grade a program on the tests of a LiveCodeBench problem, by two verdicts.

`lcb` is the verdict that LiveCodeBench's own checker would give, comparable with published numbers; `native` is the
verdict if the program runs as an ordinary process with an ordinary standard input.

Programs run in a box (`kvbench.scoring.sandbox`) that never receives an expected output; this module compares their
output outside the box. `lcb` follows ``lcb_runner/evaluation/testing_util.py`` (28fef95) with its bugs, see
`kvbench.scoring.livecodebench_harness`. Error codes:

-  0: passed
- -2: wrong or too much output
- -3: out of time
- -4: exception, out of memory or nothing to run; in `lcb` also out of time before the first test
- -5: the program ended the process (only in `lcb`)

kvbench has its own checker, because every other known checker runs programs in a process that also holds the expected
outputs, without isolation.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import math
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.scoring.livecodebench_compare import read_json, same_lines, same_value
from kvbench.scoring.sandbox import Box, BoxError, Outcome, Sandbox, inside

SECONDS = 6.0  # per test, LiveCodeBench's default
# Packages that programs may import, as in LiveCodeBench's environment, and those that each of them needs.
PACKAGES = {"numpy": (), "sympy": ("mpmath",), "mpmath": (), "networkx": ("numpy",)}
_STAR = re.findall(
    r"\w+",
    "string re datetime collections heapq bisect copy math random statistics itertools functools operator io sys json "
    "builtins typing",
)
PRELUDE = "\n".join(
    [f"from {name} import *" for name in _STAR]
    + [f"import {name}" for name in _STAR if name not in ("builtins", "typing")]
    + ["sys.setrecursionlimit(50000)\n"]
)
_FENCE = "```"
_TURN_SECONDS = 120.0  # longest wait for another second try to end; after that, both run at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of running a program on the tests of a problem, up to the first test that fails.

    If `code` is -5, `results` is (-2,), as in LiveCodeBench, however many tests passed before.
    """

    verdict: str  # pass, wrong_answer, runtime_error, time_limit, memory_limit or output_limit
    code: int  # LiveCodeBench's error code, 0 for a pass
    results: tuple[bool | int, ...]  # per test up to the first failure: True, False (a wrong value) or an error code
    seconds: float = 0.0  # of the slowest test, or of the failed test
    peak: int = 0  # bytes of memory, 0 if unknown
    detail: str = ""  # the error message of the program or of the sandbox's driver

    @property
    def passed(self) -> bool:
        return self.code == 0

    @property
    def failed_test(self) -> int | None:
        return None if self.passed else max(0, len(self.results) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grades:
    lcb: Verdict
    native: Verdict


def extract_code(text: str) -> str:
    """Return the lines between the last two lines with three backticks; "" if there are fewer than two such lines. As
    in LiveCodeBench's ``extract_code``, the returned lines may be a draft or hold no program."""
    lines = text.split("\n")
    fences = [number for number, line in enumerate(lines) if _FENCE in line]
    return "\n".join(lines[fences[-2] + 1 : fences[-1]]) if len(fences) >= 2 else ""


def grade(
    program: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    function: str | None,
    *,
    sandbox: Sandbox,
    seconds: float = SECONDS,
) -> Grades:
    """Run a program on the tests of a problem, for each of the two verdicts up to the first failed test.

    inputs, outputs: for each test the text of standard input, and the expected output. function: the name of the
    function that the tests call; None if the program reads standard input. If the tests call a function, each input
    holds its arguments (JSON, one per line), and each output the expected value (JSON). seconds: time limit per test.

    If the tests call a function and their data are not JSON, both verdicts are runtime_error. Raises ValueError if
    there are no tests, which LiveCodeBench would count as a pass, or if the numbers of inputs and outputs differ.
    Raises BoxError if the sandbox failed twice.
    """
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} expected outputs; equal numbers above 0 are needed")
    problem = _Problem(tuple(inputs), tuple(outputs), function, seconds)
    if not problem.readable():
        bad = Verdict(verdict="runtime_error", code=-4, results=(-4,), detail="the test data are not JSON")
        return Grades(lcb=bad, native=bad)
    try:
        return _grade(program, problem, sandbox)
    except BoxError:
        return _grade(program, problem, sandbox)


@dataclass(frozen=True)
class _Problem:
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    function: str | None
    seconds: float

    @functools.cached_property
    def values(self) -> list[Any]:
        return [read_json(text) for text in self.outputs]

    def readable(self) -> bool:
        if self.function is None:
            return True
        try:
            for text in self.inputs:
                for line in text.split("\n"):
                    read_json(line)
            return bool(self.values)
        except (ValueError, RecursionError):
            return False

    def room(self, test: int) -> int:
        """Return how many bytes a program may print on the test with this index.

        A program can find out this limit, and the limit depends on the length of the expected output. The limit is a
        power of two, so that it reveals little about that length.
        """
        return 1 << math.ceil(math.log2(max(1 << 20, 4 * len(self.outputs[test].encode(errors="replace")))))

    def right(self, test: int, printed: bytes) -> bool:
        if self.function is None:
            return same_lines(printed.decode(errors="replace"), self.outputs[test])
        return same_value(printed, self.outputs[test], self.values[test])


def _grade(program: str, problem: _Problem, sandbox: Sandbox) -> Grades:
    named = [(name, *needs) for name, needs in PACKAGES.items() if re.search(rf"\b{name}\b", program)]
    packages = list(dict.fromkeys(itertools.chain(*named)))
    with sandbox.box(packages) as box:
        preload = [name for name, _ in box.tier.packages(packages)]
        options = {"prelude": PRELUDE, "function": problem.function, "preload": preload}
        box.load(harness(), program, options | {"native": False})
        lcb = _twice(functools.partial(_as_lcb, box, problem))
        if problem.function is None:
            box.load(inside.text("script"), program, options)
            native = _twice(functools.partial(_natively, box, problem, _run_script))
        else:
            box.load(harness(), program, options | {"native": True})
            native = _twice(functools.partial(_natively, box, problem, _call_once))
    return Grades(lcb=lcb, native=native)


@functools.cache
def harness() -> str:
    return (Path(__file__).parent / "livecodebench_harness.py").read_text(encoding="utf-8")


# --- as LiveCodeBench does --------------------------------------------------------------------------------------------


def _as_lcb(box: Box, problem: _Problem) -> Verdict:
    """Run a program on the tests in one process, as LiveCodeBench's checker does, and return the verdict."""
    outcome = box.open(seconds=problem.seconds, total=(problem.seconds + 1) * len(problem.inputs) + 5)
    if (failed := failure(outcome)) is not None:  # the program ended or raised an exception before the first test
        code = -5 if failed[1] == -5 else -4
        return _failed(failed[0], code, [-2 if code == -5 else -4], outcome)
    results: list[bool | int] = []
    slowest = 0.0
    for test, text in enumerate(problem.inputs):
        question = text.encode(errors="surrogatepass")
        outcome = box.ask(question, seconds=problem.seconds, output=problem.room(test))
        slowest = max(slowest, outcome.seconds)
        if (failed := failure(outcome)) is not None:
            verdict, code = failed
            return _failed(verdict, code, [-2] if code == -5 else [*results, code], outcome)
        if not problem.right(test, outcome.answer[1:]):
            results.append(-2 if problem.function is None else False)
            return Verdict(verdict="wrong_answer", code=-2, results=tuple(results), seconds=outcome.seconds)
        results.append(True)
    peak = box.close_program().peak
    return Verdict(verdict="pass", code=0, results=tuple(results), seconds=slowest, peak=peak)


def failure(outcome: Outcome) -> tuple[str, int] | None:
    """Return the verdict, such as "time_limit", and the error code of a request that failed; None if it succeeded."""
    if outcome.status == "answered":
        failures = {b"E": ("runtime_error", -4), b"M": ("memory_limit", -4), b"T": ("time_limit", -3)}
        # The harness writes only E, M, T, R or O first; with another letter the program itself wrote the answer.
        return failures.get(outcome.answer[:1], None if outcome.answer[:1] in (b"R", b"O") else ("runtime_error", -4))
    ends = {"time_limit": ("time_limit", -3), "output_limit": ("output_limit", -2)}
    return ends.get(outcome.status, ("runtime_error", -5))


def _failed(verdict: str, code: int, results: list[bool | int], outcome: Outcome) -> Verdict:
    detail = (outcome.answer[1:] or outcome.stderr.strip().rpartition(b"\n")[2]).decode(errors="replace")[:300]
    return Verdict(
        verdict=verdict,
        code=code,
        results=tuple(results),
        seconds=outcome.seconds,
        peak=outcome.peak,
        detail=detail or (f"ended with {outcome.code}" if code == -5 else ""),
    )


# --- as a process -----------------------------------------------------------------------------------------------------


def _natively(box: Box, problem: _Problem, run: Callable[[Box, _Problem, int], tuple[Outcome, bytes]]) -> Verdict:
    """Run a program on each test in a new process, as an ordinary program runs, and return the verdict. run: a function
    that runs the program on the test with a given index. It returns the outcome and the program's output."""
    results: list[bool | int] = []
    slowest, peak = 0.0, 0
    for test in range(len(problem.inputs)):
        outcome, printed = run(box, problem, test)
        slowest, peak = max(slowest, outcome.seconds), max(peak, outcome.peak)
        if outcome.status not in ("ok", "answered"):
            code = {"time_limit": -3, "output_limit": -2}.get(outcome.status, -4)
            return _failed(outcome.status, code, [*results, code], outcome)
        if not problem.right(test, printed):
            wrong = (*results, -2)
            return Verdict(verdict="wrong_answer", code=-2, results=wrong, seconds=outcome.seconds, peak=outcome.peak)
        results.append(True)
    return Verdict(verdict="pass", code=0, results=tuple(results), seconds=slowest, peak=peak)


def _run_script(box: Box, problem: _Problem, test: int) -> tuple[Outcome, bytes]:
    stdin = problem.inputs[test].encode(errors="surrogatepass")
    outcome = box.run(stdin, seconds=problem.seconds, output=problem.room(test))
    return outcome, outcome.stdout


def _call_once(box: Box, problem: _Problem, test: int) -> tuple[Outcome, bytes]:
    outcome = box.open(seconds=problem.seconds, total=problem.seconds)
    if failure(outcome) is None:
        question = problem.inputs[test].encode(errors="surrogatepass")
        outcome = box.ask(question, seconds=problem.seconds, output=problem.room(test))
    failed = failure(outcome)
    peak = box.close_program().peak
    status: Any = outcome.status if failed is None else failed[0]
    ended = Outcome(status=status, code=outcome.code, seconds=outcome.seconds, peak=peak, answer=outcome.answer)
    return ended, outcome.answer[1:]


# --- second tries -----------------------------------------------------------------------------------------------------


def _twice(run: Callable[[], Verdict]) -> Verdict:
    """Run a program; if it runs out of time (error code -3), run it once more. Return the verdict of the last run. The
    machine may have been busy during the first run."""
    verdict = run()
    if verdict.code != -3:
        return verdict
    with _alone():
        return run()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hold a lock while a second try runs, so that only one process of this user makes a second try at a time.

    After waiting `_TURN_SECONDS` for the lock, or if the lock's file cannot be opened, the ``with`` block runs without
    the lock.

    Does not use the package filelock, because the audit runs graders as a user who can import only the standard
    library.
    """
    path = os.path.join(tempfile.gettempdir(), f"kvbench-second-try-{os.getuid()}")
    deadline = time.monotonic() + _TURN_SECONDS
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(0.05)
        yield
    finally:
        os.close(lock)
