"""Run a C++ program on the tests of a problem of SPoC (Kulal et al. 2019), as LongProc's `spoc_evaluator.py` does.

The compiler runs outside the sandbox, under limits of its own, since it does not run the program. Only the binary
runs in a box (`kvbench.scoring.sandbox`). The binary is linked statically, because a box has no libraries for it.
A program passes a test if it keeps the limits and prints exactly the expected bytes, whatever its exit code.
"""

from __future__ import annotations

import functools
import os
import re
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.errors import SetupError
from kvbench.scoring.sandbox import Box, BoxError, Outcome, Sandbox, inside

HEADERS = (
    *("cstdio", "iostream", "vector", "algorithm", "numeric", "cmath", "cstring", "set", "map", "queue", "stack"),
    *("list", "fstream", "climits", "cassert", "iomanip", "sstream", "bitset"),
)
HEAD = "".join(f"#include <{name}>\n" for name in HEADERS) + "using namespace std;\n"
COMMAND = ("g++", "-std=c++11", "-O", "-static", "-fno-lto", "-x", "c++", "-o")
SECONDS = 3.0  # per test
TESTS = 10  # of a problem at most
COMPILE_SECONDS = 60.0
_COMPILE_LIMITS = {resource.RLIMIT_CPU: 60, resource.RLIMIT_AS: 4 << 30, resource.RLIMIT_FSIZE: 64 << 20}
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
    """Raise SetupError if g++ is not installed."""
    if shutil.which(COMMAND[0]) is None:
        raise SetupError(
            "C++ answers need the compiler g++, which is not installed. Install it (Debian: apt install g++)."
        )


def extract(text: str) -> str | None:
    """Return the program between the first ```cpp or ```c++ fence and the last fence; None if a fence is missing."""
    found = _FENCED.search(text.replace("```c++", "```cpp"))
    return found[1] if found else None


def grade(program: str, tests: Sequence[Test], sandbox: Sandbox) -> Verdict:
    """Run a program on at most `TESTS` of its tests, up to the first that fails. Raises SetupError if the compiler does
    not work here, BoxError if no binary can run in the sandbox."""
    _check(sandbox)
    binary = compiled(program)
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


def compiled(program: str) -> bytes | None:
    """Return the binary of a program with LongProc's headers; None if the compiler refuses it or takes too long."""
    with tempfile.TemporaryDirectory(prefix="kvbench-cpp-") as folder:
        binary = Path(folder) / "program"
        compiler = subprocess.Popen(
            (*COMMAND, binary.name, "-"),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C", "TMPDIR": folder},
            preexec_fn=_bound,
            start_new_session=True,
        )
        try:
            compiler.communicate((HEAD + program).encode("utf-8", "replace"), timeout=COMPILE_SECONDS)
        except BaseException as error:
            # Also end the processes that g++ started: one may wait for ever, as for a pipe that the program includes.
            os.killpg(compiler.pid, signal.SIGKILL)
            compiler.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return None
            raise
        return binary.read_bytes() if compiler.returncode == 0 else None


def _bound() -> None:
    for which, most in _COMPILE_LIMITS.items():
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))


def _run(box: Box, stdin: bytes, output: int) -> Outcome:
    """Run the binary, and once more if it ran out of time, since the machine may have been busy."""
    outcome = box.run(stdin, seconds=SECONDS, output=output)
    return box.run(stdin, seconds=SECONDS, output=output) if outcome.status == "time_limit" else outcome


def _lines(lines: Sequence[str]) -> bytes:
    return ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass")


@functools.cache
def _check(sandbox: Sandbox) -> None:
    """Raise SetupError unless a small program compiles, and BoxError unless its binary runs in a box."""
    require()
    binary = compiled("int main() { string s; cin >> s; cout << s << endl; return 0; }")
    if binary is None:
        raise SetupError(
            "g++ cannot link a C++ program statically here. Install its static libraries (libstdc++.a, libc.a)."
        )
    with sandbox.box(compiled=True) as box:
        box.load(inside.text("binary"), "", {"size": len(binary)})
        outcome = box.run(binary + b"ready\n", seconds=10.0)
    if outcome.stdout != b"ready\n":
        why = outcome.stderr.decode(errors="replace").strip().rpartition("\n")[2] or outcome.status
        raise BoxError(f"the sandbox's tier {sandbox.tier.name} cannot run binaries here ({why})")
