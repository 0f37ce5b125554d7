"""LiveCodeBench code generation (Jain et al. 2024, arXiv:2403.07974), the lite set: programs for contest problems.

`score` is the verdict that LiveCodeBench's own checker would give, bugs included, for comparison with published
numbers. `passed_native` is the verdict when the program runs as an ordinary process. Only a program after the thinking
block counts; the additional score `official` also accepts drafts in the block, as LiveCodeBench does. kvbench reads the
data set's raw files and does not run the data set's loading script. Programs run in `kvbench.scoring.sandbox` only.
docs/tasks.md describes variants, prompts and columns.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from typing import Any

from kvbench.errors import SetupError, bare, quote
from kvbench.registry import tasks
from kvbench.scoring.boxed import after_thinking
from kvbench.scoring.livecodebench import SECONDS, Grades, Verdict, extract_code, grade
from kvbench.scoring.livecodebench_tests import TestDataError, read_tests
from kvbench.scoring.sandbox import BoxError, Limits, Sandbox, choose
from kvbench.task import DataSource, Doc, GenSpec, Manifest, Output, Score, Task, Turn
from kvbench.taskkit.context_template import bundled
from kvbench.taskkit.rows import documents, reasoning

ROWS = (400, 111, 101, 101, 167, 175)  # of test.jsonl, test2.jsonl, ...
LAST = len(ROWS)
LONGEST = 20_000  # characters of a program that a row keeps
PATIENCE = 3600.0  # seconds; each test has its own limit, this one only ends a grader that hangs
# LiveCodeBench's ERRATA.md (28fef95): problems with several right answers, with interactive input, or with wrong tests.
ERRATA = frozenset(
    {
        *("abc311_c", "abc326_d", "abc327_b", "abc333_e", "abc343_a", "abc343_e", "abc362_c", "arc185_c"),
        "find-words-containing-character",
        *("find-the-peaks", "generate-binary-strings-without-adjacent-zeros", "abc337_e", "abc355_e", "abc350_c"),
        *("apply-operations-to-make-string-empty", "most-frequent-ids", "arc189_a"),
    }
)
NO_PROGRAM = Verdict(verdict="runtime_error", code=-4, results=(-4,), detail="no program")


def _files(variant: str) -> range:
    """Return the numbers of the data set's files that a variant reads; the first file has number 1."""
    first, _, last = variant.removeprefix("release_").replace("v", "").partition("_")
    return range(1 if variant.startswith("release") else int(first), int(last or first) + 1)


@tasks.register("livecodebench", aliases=("lcb",))
class LiveCodeBench(Task):
    version = "3"  # programs may import sympy, mpmath and networkx, and open /dev/stdin
    suite = "code"
    summary = "LiveCodeBench, 1055 contest problems; runs the answers in a sandbox"
    variants = (
        *(f"release_v{n}" for n in (LAST, *range(1, LAST))),
        *(f"v{n}" for n in range(1, LAST + 1)),
        *(f"v{a}_v{b}" for a in range(1, LAST) for b in range(a + 1, LAST + 1)),
    )
    prompt_styles = ("default", "lcb_generic", "gkv")
    needs = frozenset({"code"})

    @property
    def manifest(self) -> Manifest:  # type: ignore[override]  # one for each variant
        numbers = _files(self.variant)
        files = tuple(f"test{n if n > 1 else ''}.jsonl" for n in numbers)
        return Manifest(
            path=f"livecodebench/{files[0] if len(files) == 1 else f'{self.variant}.jsonl'}",
            rows=sum(ROWS[n - 1] for n in numbers),
            hub="livecodebench/code_generation_lite",
            files=files,
            revision="0fe84c3912ea0c4d4a78037083943e8f0c4dd505",
            samples=("livecodebench/synthetic_lcb_format.jsonl",),
            licence="CC",
        )

    def docs(self, source: DataSource, *, style: str = "default", limit: int | None = None) -> list[Doc]:
        """Return the documents, sorted by `question_id` as in LiveCodeBench's own code. Raises SetupError if the
        metadata of a row are not JSON."""
        constants = json.loads(bundled("livecodebench/prompt_constants.json"))
        try:
            rows = sorted(source.rows(self.name, self.manifest), key=lambda row: str(row.get("question_id")))
            return documents(self, rows[:limit], lambda row: _doc(row, style, constants), ids="question_id")
        except ValueError as error:
            raise SetupError(
                f"data of task {quote(self.name)}: metadata are not JSON ({error}). Download the data again."
            ) from None

    def gen(self, model_type: str) -> GenSpec:
        return reasoning(model_type, n=4, max_new_tokens=32768)  # four samples, as in G-KV

    def patience(self, doc: Doc) -> float:
        return PATIENCE

    def score(self, doc: Doc, output: Output) -> Score:
        """Run the answer's program on the problem's tests, for each of the two verdicts up to the first failed test. If
        the sandbox or the tests cannot be used, the score has no value."""
        program, whole = extract_code(after_thinking(output.text, output.thinking)), extract_code(output.text)
        try:
            sandbox = choose(self.services.unsafe_code)
            tests = read_tests(doc.reference["public"]) + read_tests(doc.reference["private"])
            grades = _grade(program, tests, doc, sandbox)
            official = grades if whole == program else _grade(whole, tests, doc, sandbox)
        except (SetupError, BoxError) as error:
            return Score(value=None, status="sandbox_error", extracted=program[:LONGEST], note=str(error)[:300])
        except TestDataError as error:
            return Score(value=None, note=f"error: {error}"[:300])
        verdict = grades.lcb
        return Score(
            value=float(verdict.passed),
            extracted=program[:LONGEST] or None,
            aux={
                "official": float(official.lcb.passed),
                "no_program": float(not program),
                "error_code": float(verdict.code),
                "tests": float(len(tests)),
                "failed_test": float(-1 if verdict.failed_test is None else verdict.failed_test),
                "test_seconds": verdict.seconds,
                "peak_mib": float(max(verdict.peak, grades.native.peak) >> 20),
                "errata": float(doc.meta["errata"]),
                "contest_date": float(doc.meta["contest_date"]),
            },
            facts={
                "verdict": verdict.verdict,
                "passed_lcb": verdict.passed,
                "passed_native": grades.native.passed,
                "sandbox_tier": sandbox.tier.name,
                "sandbox_selftest": sandbox.digest or None,
                "python_version": platform.python_version(),
            },
            note=bare(verdict.detail),
        )

    def sources(self) -> dict[str, str]:
        limits = Limits()
        return {
            "limits": f"{SECONDS:g} s a test, {limits.memory >> 20} MiB, stack {limits.stack >> 20} MiB, "
            f"{limits.threads} threads, {limits.files} files, output {limits.output >> 20} MiB"
        }


def _grade(program: str, tests: list[Any], doc: Doc, sandbox: Sandbox) -> Grades:
    """Run a program on the tests; return two verdicts: that of LiveCodeBench's checker, and the one if the program
    runs as an ordinary process.

    If there is no program, both verdicts are failures. Raises TestDataError for a problem without tests, because any
    program would pass.
    """
    if not tests:
        raise TestDataError("the problem has no tests, so any program would pass")
    if not program:
        return Grades(lcb=NO_PROGRAM, native=NO_PROGRAM)
    inputs, outputs = [test.input for test in tests], [test.output for test in tests]
    return grade(program, inputs, outputs, doc.reference["function"], sandbox=sandbox)


def _doc(row: Mapping[str, Any], style: str, constants: Mapping[str, str]) -> Doc:
    metadata = json.loads(row["metadata"]) if isinstance(row["metadata"], str) else row["metadata"]
    name = str(row["question_id"])
    return Doc(
        doc_id=name,
        turns=(_turn(row, style, constants),),
        reference={
            "public": row["public_test_cases"],
            "private": row["private_test_cases"],
            "function": metadata.get("func_name"),
        },
        meta={
            "category": f"{row['difficulty']}/{row['platform']}",
            "contest_date": int("".join(c for c in str(row["contest_date"])[:10] if c.isdigit()) or 0),
            "errata": bool(ERRATA & {name, str(row["question_title"])}),
        },
    )


def _turn(row: Mapping[str, Any], style: str, constants: Mapping[str, str]) -> Turn:
    """Return the turn that asks for a program for one problem: a user message, and in some styles a system message.

    Styles: `default` is the text that LiveCodeBench and lighteval give to R1 and QwQ. `gkv` adds LiveCodeBench's system
    message for R1, without its special tokens, which the chat template adds. `lcb_generic` is LiveCodeBench's generic
    prompt.
    """
    starter = str(row["starter_code"] or "")
    kind = "FORMATTING_MESSAGE_WITH_STARTER_CODE" if starter else "FORMATTING_WITHOUT_STARTER_CODE"
    form, block = constants[kind], f"```python\n{starter or '# YOUR CODE HERE'}\n```\n\n"
    system = constants["SYSTEM_MESSAGE_GENERIC"]
    if style == "lcb_generic":
        question = f"### Question:\n{row['question_content']}\n\n### Format: {form}\n{block}"
        return Turn(question=f"{question}### Answer: (use the provided format with backticks)\n\n", system=system)
    body = f"{system.partition('. ')[2]}\n\nQuestion: {row['question_content']}\n\n{form}\n{block}"
    if style == "gkv":
        return Turn(question=body, system=constants["SYSTEM_MESSAGE_DEEPSEEK_R1"].split("｜>")[1].partition("<｜")[0])
    return Turn(question=body)
