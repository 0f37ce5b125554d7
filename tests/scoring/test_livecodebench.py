"""The two verdicts: against LiveCodeBench's own checker on recorded programs, and on what it misjudges."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from support.folders import DATA
from support.sandboxes import LOCKED

from kvbench.scoring import livecodebench
from kvbench.scoring.livecodebench import Grades, extract_code, grade
from kvbench.scoring.livecodebench_compare import same_lines, same_value
from kvbench.scoring.sandbox import BoxError, Sandbox
from kvbench.scoring.sandbox.tiers import Bwrap, Landlock, Tier, Unsafe

GOLDENS = DATA / "goldens"
SECONDS = 0.4  # where a program is to run out of them
SUM = "4 5\n1 1\n"


def _rows(name: str) -> list[Any]:
    lines = (GOLDENS / name).read_text(encoding="utf-8").splitlines()
    return [pytest.param(row, id=f"{row['id']} {row['note']}") for row in map(json.loads, lines)]


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(next((tier for tier in (Landlock(), Bwrap()) if not tier.missing()), Unsafe()), "")


def _go(sandbox: Sandbox, program: str, output: str = "9\n2\n", text: str = SUM, seconds: float = 10.0) -> Grades:
    return grade(program, [text], [output], None, sandbox=sandbox, seconds=seconds)


def _call(sandbox: Sandbox, body: str, outputs: Sequence[str], inputs: Sequence[str] = ("1",)) -> Grades:
    return grade(body, inputs, outputs, "go", sandbox=sandbox, seconds=10.0)


@pytest.mark.parametrize("row", _rows("livecodebench.jsonl"))
def test_recorded_verdicts(row: dict[str, Any], sandbox: Sandbox) -> None:
    tests = row["input_output"]
    slow = row["expected_error_code"] == -3
    got = grade(
        row["code"],
        tests["inputs"],
        tests["outputs"],
        tests["fn_name"],
        sandbox=sandbox,
        seconds=SECONDS if slow else 10.0,
    ).lcb
    assert (got.passed, got.code, list(got.results)) == (
        row["expected_pass"],
        row["expected_error_code"],
        row["expected_results"],
    )


@pytest.mark.parametrize("row", _rows("livecodebench_extract.jsonl"))
def test_recorded_extraction(row: dict[str, Any]) -> None:
    assert extract_code(row["output"]) == row["expected"]


LOOP = "for _ in range(2):\n    print(sum(map(int, {}.split())))\n"


@pytest.mark.parametrize(
    ("program", "code", "native"),
    [
        (LOOP.format("input()"), 0, True),
        ("import sys\n" + LOOP.format("sys.stdin.readline()"), 0, True),
        ("from sys import stdin\n" + LOOP.format("stdin.readline()"), 0, True),
        (LOOP.format("stdin.readline()"), 0, True),  # by the name that the prelude imports
        ("import sys\n" + LOOP.format("sys.stdin.buffer.readline()"), -2, True),
        ("import sys\nfor line in sys.stdin:\n    print(sum(map(int, line.split())))", -4, True),
        ("import sys\n" + LOOP.format("next(sys.stdin)"), -4, True),
        ("for line in open(0).read().split('\\n')[:2]:\n    print(sum(map(int, line.split())))", -2, True),
        ("import os\nfor line in os.read(0, 99).split(b'\\n')[:2]:\n    print(sum(map(int, line.split())))", -2, True),
        (
            "from sys import stdin\nimport sys\na = sys.stdin.readline()\nb = sys.stdin.read()\n"
            "for x in a, b:\n    print(sum(map(int, x.split())))",
            -2,
            True,
        ),
        ("import sys\nsys.stdout.buffer.write(b'9\\n2\\n')", -4, True),
        ("import os\nos.write(1, b'9\\n2\\n')", -2, True),
        ("from sys import stdout\nstdout.write('9\\n2\\n')", -2, True),
        ("x = 0\ndef f():\n    global x\n    x = 9\nf()\nprint(x, 2, sep='\\n')", -2, True),
        ("x = 8\ndef f():\n    global x\n    x += 1\nf()\nprint(x, 2, sep='\\n')", -4, True),
        ("import os, sys\nprint(9, 2, sep='\\n')\nsys.stdout.flush()\nos._exit(0)", -5, True),
        (LOOP.format("input()") + "exit()", 0, True),
        (LOOP.format("input()") + "quit()", -4, True),
        (LOOP.format("input()") + "import sys\nsys.exit()", 0, True),
        ("print(Counter('a' * 9)['a'], gcd(4, 6), sep='\\n')", 0, True),
        (LOOP.format("input()").replace("sum", "float(sum").replace("))))", ")))))"), 0, True),
        ("if __name__ == '__main__':\n    print(9, 2, sep='\\n')", 0, True),
        ("if '__main__' == __name__:\n    print(9, 2, sep='\\n')", -2, True),
        ("from __future__ import annotations\n" + LOOP.format("input()"), -4, True),
        ("class Solution: pass\n" + LOOP.format("input()"), -4, True),
        ("import builtins\nprint(*[sum(map(int, l.split())) for l in builtins.open('any')], sep='\\n')", 0, False),
        ("import resource\n" + LOOP.format("input()"), -4, True),
        ("raise KeyboardInterrupt", -5, False),
        ("import ctypes\nctypes.string_at(0)", -5, False),
        ("class TimeoutException(Exception): pass\nraise TimeoutException", -3, False),
        ("x = bytearray(4 << 30)", -4, False),
    ],
)
def test_what_livecodebench_misjudges(program: str, code: int, native: bool, sandbox: Sandbox) -> None:
    """Codes are those of the original's code on the same programs, `native` those of a plain Python process."""
    got = _go(sandbox, program)
    assert (got.lcb.code, got.native.passed) == (code, native), got


@pytest.mark.parametrize("tier", LOCKED)
@pytest.mark.parametrize(
    ("program", "passes"),
    [
        ("from sympy import isprime\nprint(int(isprime(int(input()))))", True),
        ("import networkx as nx\nprint(nx.shortest_path_length(nx.path_graph(2), 0, 1))", True),
        ("import mpmath\nprint(int(mpmath.sqrt(1)))", True),
        ("import scipy\nprint(1)", False),
    ],
)
def test_packages_of_the_official_environment(program: str, passes: bool, tier: Tier) -> None:
    got = grade(program, ["7\n"], ["1\n"], None, sandbox=Sandbox(tier, ""), seconds=10.0)
    assert got.lcb.passed is got.native.passed is passes, got


FUNCTION = "class Solution:\n    def go(self, a): return {}"


@pytest.mark.parametrize(
    ("value", "output", "passes"),
    [
        ("(1, 2)", "[1, 2]", True),
        ("[(1, 2)]", "[[1, 2]]", False),
        ("{'1': 2}", '{"1": 2}', True),
        ("{1: 2}", '{"1": 2}', False),
        ("{1, 2}", "[1, 2]", False),
        ("deque([1])", "[1]", False),
        ("Counter('aab')", '{"a": 2, "b": 1}', True),
        ("__import__('numpy').int64(5)", "5", True),
        ("[__import__('numpy').float64(5)]", "[5]", True),
        ("__import__('numpy').array([1, 2])", "[1, 2]", False),
        ("__import__('fractions').Fraction(1, 2)", "0.5", True),
        ("0.1 + 0.2", "0.3", False),
        ("float('nan')", "NaN", False),
        ("float('inf')", "1e999", True),
        ("10**5000", "1" + "0" * 5000, True),
        ("True", "1", True),
        ("None", "null", True),
        ("b'a'", '"a"', False),
        ("type('E', (int,), {'__eq__': lambda s, o: True})(7)", "1", False),
        ("type('E', (), {'__eq__': lambda s, o: True})()", "1", False),
    ],
)
def test_values_of_functions(value: str, output: str, passes: bool, sandbox: Sandbox) -> None:
    got = _call(sandbox, FUNCTION.format(value), [output])
    assert got.lcb.passed is got.native.passed is passes, got


def test_state_that_outlives_a_test(sandbox: Sandbox) -> None:
    """The checker calls one object in one process; a real judge would not."""
    body = "class Solution:\n    n = 0\n    def go(self, a):\n        Solution.n += 1\n        return self.n"
    got = _call(sandbox, body, ["1", "1"], ["1", "1"])
    assert list(got.lcb.results) == [True, False]
    assert got.native.passed


def test_functions_that_are_not_there_and_modules_that_hang(sandbox: Sandbox) -> None:
    assert _call(sandbox, "class Solution: pass", ["1"]).lcb.code == -4
    assert _call(sandbox, "exit()", ["1"]).lcb.code == -5
    hung = grade("while True: pass", ["1"], ["1"], "go", sandbox=sandbox, seconds=SECONDS)
    assert (hung.lcb.code, hung.lcb.verdict, hung.native.code) == (-4, "time_limit", -3)


def test_the_first_failure_ends_it(sandbox: Sandbox) -> None:
    got = grade("print(input())", ["1", "2", "3"], ["1", "x", "3"], None, sandbox=sandbox)
    assert got.lcb.results == got.native.results == (True, -2)
    assert got.lcb.failed_test == 1


def test_what_a_verdict_says(sandbox: Sandbox) -> None:
    got = _go(sandbox, "print(9)\n1/0")
    assert "division by zero" in got.lcb.detail
    assert "division by zero" in got.native.detail
    assert _go(sandbox, "print('x' * (4 << 20))").native.verdict == "output_limit"
    assert _go(sandbox, "print(9, 2, sep='\\n')").native.peak > 1 << 20


def test_long_output_is_taken_where_it_is_expected(sandbox: Sandbox) -> None:
    text = "x" * (3 << 20)
    got = _go(sandbox, "print('x' * (3 << 20))", text)
    assert got.lcb.passed
    assert got.native.passed


def test_no_tests_are_no_pass(sandbox: Sandbox) -> None:
    with pytest.raises(ValueError, match="0 inputs"):
        grade("print(1)", [], [], None, sandbox=sandbox)
    with pytest.raises(ValueError, match="1 inputs and 2 expected"):
        grade("print(1)", ["1"], ["1", "2"], None, sandbox=sandbox)


@pytest.mark.parametrize(("text", "value"), [("x", "1"), ("1", ""), ("[" * 100_000, "1")])
def test_tests_that_are_not_json_fail_as_there(text: str, value: str, sandbox: Sandbox) -> None:
    assert _call(sandbox, FUNCTION.format("a"), [value], [text]).lcb.code == -4


def test_out_of_time_is_tried_again_alone(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    original = livecodebench._as_lcb

    def first_slow(box: Any, problem: Any) -> livecodebench.Verdict:
        runs.append("lcb")
        if len(runs) == 1:
            return livecodebench.Verdict(verdict="time_limit", code=-3, results=(-3,))
        return original(box, problem)

    monkeypatch.setattr(livecodebench, "_as_lcb", first_slow)
    assert _go(sandbox, "print(9, 2, sep='\\n')").lcb.passed
    assert runs == ["lcb", "lcb"]


def test_a_sandbox_that_fails_is_tried_twice_and_is_no_verdict(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []
    original = Sandbox.box

    def broken(self: Sandbox, *arguments: Any) -> Any:
        tries.append(1)
        if len(tries) % 2:
            raise BoxError("gone")
        return original(self, *arguments)

    monkeypatch.setattr(Sandbox, "box", broken)
    assert _go(sandbox, "print(9, 2, sep='\\n')").lcb.passed
    monkeypatch.setattr(Sandbox, "box", lambda self, *a: (_ for _ in ()).throw(BoxError("gone")))
    with pytest.raises(BoxError):
        _go(sandbox, "print(1)")


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1.50 2\n", "1.5 2.0", True),
        ("a  b", "a b", False),
        ("a\n\n", "a", True),
        ("a\n\nb", "a\nb", False),
        ("1e3", "1000", True),
        ("nan", "NaN", False),
        ("sNaN", "sNaN 1", False),
        ("1_0", "10", True),
        ("", "\n", True),
        ("0x10", "16", False),
        ("1e999999999", "1e999999998", False),
    ],
)
def test_lines(printed: str, expected: str, same: bool) -> None:
    assert same_lines(printed, expected) is same


@pytest.mark.parametrize(
    "told", [b"", b"[" * 60_000, b"9" * 60_000, b"\xff", b"NaN", b"x" * (1 << 20), b'{"a":' * 10_000, b"1 2", b"null"]
)
def test_hostile_answers_are_wrong_answers(told: bytes) -> None:
    assert same_value(told, "1", 1) is False
