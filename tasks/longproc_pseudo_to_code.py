"""LongProc's pseudo_to_code (Ye et al. 2025, arXiv:2501.05414): translate pseudocode into C++, line by line.

An answer is right if its program passes the tests of its problem, at most the first ten (see
`kvbench.scoring.longproc.cpp`). The task needs g++. Both g++ and the programs run in the sandbox.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kvbench.errors import SetupError
from kvbench.registry import tasks
from kvbench.scoring.longproc import cpp
from kvbench.scoring.sandbox import BoxError, choose
from kvbench.task import Doc, Output, Score
from kvbench.taskkit.longproc import LongProc
from kvbench.taskkit.rows import answer

LONGEST = 20_000  # characters of a program that a row keeps


@tasks.register("longproc_pseudo_to_code")
class PseudoToCode(LongProc):
    summary = "LongProc pseudo_to_code, C++ programs of up to 0.5K and 2K tokens; runs the answers in a sandbox"
    variants = ("0.5k", "2k")
    rows: ClassVar = {"0.5k": 199, "2k": 200}
    mark = "{pseudocode}"
    needs = frozenset({"code"})
    cheap_score = False

    def require(self) -> None:
        cpp.require()

    def patience(self, doc: Doc) -> float:
        return 300.0

    def score(self, doc: Doc, output: Output) -> Score:
        program = cpp.extract(answer(output))
        if program is None:
            return Score(value=0.0, partial=0.0, aux={"extraction_rate": 0.0, "no_answer": 1.0})
        try:
            sandbox = choose(self.services.unsafe_code)
            verdict = cpp.grade(program, doc.reference, sandbox)
        except (SetupError, BoxError) as error:
            return Score(value=None, status="sandbox_error", extracted=program[:LONGEST], note=str(error)[:300])
        right = float(verdict.verdict == "pass")
        return Score(
            value=right,
            partial=right,
            extracted=program[:LONGEST],
            aux={
                "extraction_rate": 1.0,
                "no_answer": 0.0,
                "tests": float(min(len(doc.reference), cpp.TESTS)),
                "failed_test": float(verdict.failed_test),
            },
            facts={
                "verdict": verdict.verdict,
                "sandbox_tier": sandbox.tier.name,
                "sandbox_selftest": sandbox.digest or None,
            },
        )

    def texts(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {"pseudocode": "\n".join(row["pseudocode_lines"])}

    def reference(self, row: Mapping[str, Any]) -> list[tuple[list[str], list[str]]]:
        """Return the tests of a row's problem, each as lines of input and lines of output. Raises ValueError for a
        problem without tests, because any program would pass."""
        tests = [([*map(str, given)], [*map(str, expected)]) for given, expected in row["testcases"]]
        if not tests:
            raise ValueError("the problem has no tests: 'testcases' is empty")
        return tests

    def cluster(self, row: Mapping[str, Any]) -> str:
        return str(row["problem_id"])
