"""Run a C++ program on the tests of a problem of SPoC (Kulal et al. 2019), as LongProc's `spoc_evaluator.py` does.

The compiler runs in a box of its own (`kvbench.scoring.sandbox`), because a program can put any file that the compiler
may read into its binary. The binary runs in another box. It is linked statically, because that box has no libraries for
it. A program passes a test if it keeps the limits and prints exactly the expected bytes, whatever its exit code.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.errors import SetupError, quote
from kvbench.scoring.sandbox import Box, BoxError, Limits, Outcome, Sandbox, choose, inside, toolchain

HEADERS = (
    *("cstdio", "iostream", "vector", "algorithm", "numeric", "cmath", "cstring", "set", "map", "queue", "stack"),
    *("list", "fstream", "climits", "cassert", "iomanip", "sstream", "bitset"),
)
HEAD = "".join(f"#include <{name}>\n" for name in HEADERS) + "using namespace std;\n"
OPTIONS = ("-std=c++11", "-O", "-static", "-fno-lto", "-x", "c++", "-")
SECONDS = 3.0  # per test
TESTS = 10  # of a problem at most
COMPILE_SECONDS = 60.0
COMPILE_LIMITS = Limits(memory=4 << 30, stack=64 << 20, file_bytes=64 << 20, output=64 << 20)
_PROBE = "int main() { string s; cin >> s; cout << s << endl; return 0; }"
# Messages about the program, not the machine.
_REFUSED = re.compile(rb"^<stdin>:\d+:\d+: error: |undefined reference to", re.MULTILINE)
_FENCED = re.compile(r"```cpp([\s\S]*)```")  # greedy: up to the last fence

Test = tuple[Sequence[str], Sequence[str]]  # lines of standard input, lines of standard output


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a program's tests.

    verdict: pass, wrong_answer, time_limit, output_limit or compile_error. failed_test: the index of the first failed
    test, from 0; -1 if no test failed or none was run.
    """

    verdict: str
    failed_test: int = -1


def require() -> None:
    """Raise SetupError unless C++ programs can be compiled and run here.

    If no sandbox works, this function compiles and runs a test program without isolation. The caller decides whether
    answers may run without isolation.
    """
    try:
        _check(choose(unsafe=True))
    except BoxError as error:
        raise SetupError(f"C++ answers cannot be graded here: {error}.") from None


def extract(text: str) -> str | None:
    """Return the program between the first ```cpp or ```c++ fence and the last fence; None if a fence is missing."""
    found = _FENCED.search(text.replace("```c++", "```cpp"))
    return found[1] if found else None


def grade(program: str, tests: Sequence[Test], sandbox: Sandbox) -> Verdict:
    """Run a program on at most `TESTS` of its tests, up to the first that fails. Raises SetupError if the compiler does
    not work here, BoxError if the sandbox or the compiler fails for a reason other than the program."""
    binary = _binary(program, sandbox, _check(sandbox))
    if binary is None:
        return Verdict("compile_error")
    with sandbox.box(compiled=True) as box:
        box.load(inside.text("binary"), "", {"size": len(binary)})
        for number, (given, expected) in enumerate(tests[:TESTS]):
            wanted = _lines(expected)
            outcome = _run(box, binary + _lines(given), max(1 << 20, 4 * len(wanted)))
            if outcome.status in ("time_limit", "output_limit"):
                return Verdict(outcome.status, number)
            if outcome.stdout != wanted:
                return Verdict("wrong_answer", number)
    return Verdict("pass")


def compiled(program: str, sandbox: Sandbox, compiler: str) -> Outcome:
    """Compile a program with LongProc's headers. If the status is "ok", standard output is the binary. Raises BoxError
    if the sandbox fails."""
    path = f"{os.path.dirname(compiler)}:{toolchain.PATH}"
    with sandbox.compiler_box(toolchain.folders(compiler), COMPILE_LIMITS) as box:
        box.load(inside.text("compiler"), "", {"command": [compiler, *OPTIONS], "path": path})
        return box.run((HEAD + program).encode("utf-8", "replace"), seconds=COMPILE_SECONDS)


def _binary(program: str, sandbox: Sandbox, compiler: str) -> bytes | None:
    """Return the binary of a program; None if the compiler refuses it. Raises BoxError if no program compiles."""
    for _ in range(2):  # a machine that is short of time, memory or disk may fail once
        outcome = compiled(program, sandbox, compiler)
        if outcome.status == "ok":
            return outcome.stdout
        if _REFUSED.search(outcome.stderr):
            return None
    probe = compiled(_PROBE, sandbox, compiler)
    if probe.status != "ok":
        raise BoxError(f"g++ compiles no program here any more ({_reason(probe)})")
    return None


def _run(box: Box, stdin: bytes, output: int) -> Outcome:
    """Run the binary, and once more if it ran out of time, since the machine may have been busy."""
    outcome = box.run(stdin, seconds=SECONDS, output=output)
    return box.run(stdin, seconds=SECONDS, output=output) if outcome.status == "time_limit" else outcome


def _lines(lines: Sequence[str]) -> bytes:
    return ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")


@functools.cache
def _check(sandbox: Sandbox) -> str:
    """Return the path of the first g++ that compiles a small program. Raises SetupError if none does, BoxError if the
    program's binary does not run in a box."""
    probes = {compiler: compiled(_PROBE, sandbox, compiler) for compiler in toolchain.compilers()}
    if not probes:
        raise SetupError(
            "C++ answers need the compiler g++, which is not installed. Install it (Debian: apt install g++)."
        )
    works = [compiler for compiler, probe in probes.items() if probe.status == "ok"]
    if not works:
        compiler, probe = next(iter(probes.items()))
        raise SetupError(
            f"{quote(compiler)} cannot compile and statically link a C++ program in the sandbox ({_reason(probe)}). If "
            "it lacks static libraries (libstdc++.a, libc.a), install them, or put another g++ first on PATH."
        )
    probe = probes[works[0]]
    with sandbox.box(compiled=True) as box:
        box.load(inside.text("binary"), "", {"size": len(probe.stdout)})
        outcome = box.run(probe.stdout + b"ready\n", seconds=10.0)
    if outcome.stdout != b"ready\n":
        why = outcome.stderr.decode(errors="replace").strip().rpartition("\n")[2] or outcome.status
        raise BoxError(f"the sandbox's tier {sandbox.tier.name} cannot run binaries here ({why})")
    return works[0]


def _reason(outcome: Outcome) -> str:
    """Return the first line of the compiler's messages or, without one, the status."""
    return (outcome.stderr.decode(errors="replace").strip().partition("\n")[0] or outcome.status)[:200]
