"""LongProc's pseudo_to_code: prompts of made rows, programs compiled and run in a sandbox, and what they can do."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.folders import DATA
from support.sandboxes import compiles

from kvbench.errors import SetupError
from kvbench.scoring.longproc import cpp
from kvbench.scoring.sandbox import Outcome, choose, toolchain
from kvbench.sources.data import BUNDLED, Data
from kvbench.task import Output, Score
from kvbench.taskkit.names import get_task

SOURCE = Data(DATA / "tasks", env={})
FILE = DATA / "tasks" / "longproc" / "pseudo_to_code_0.5k.sample.jsonl"
ROWS = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


GXX = next(iter(toolchain.compilers()), "")


def score(text: str) -> Score:
    task = get_task("longproc_pseudo_to_code")
    output = Output(text=text, stop_reason="stop", prompt_tokens=1, output_tokens=1, thinking=False)
    return task.score(task.docs(SOURCE)[0], output)


@compiles
def test_documents():
    task = get_task("longproc_pseudo_to_code")
    first, second = task.docs(SOURCE)
    template = (BUNDLED / "longproc" / "pseudo_to_code.txt").read_bytes().decode()
    assert first.turns[0].user == template.format(pseudocode="\n".join(ROWS[0]["pseudocode_lines"]))
    assert first.turns[0].question == "[CODE]:"
    assert first.cluster == second.cluster == "1A"
    assert (task.size(), get_task("longproc_pseudo_to_code/2k").size(), task.needs) == (199, 200, {"code"})


@compiles
def test_programs_are_extracted_as_by_the_official_pattern():
    assert cpp.extract("a ```c++\nint x;``` b ```cpp\nint y;\n``` c") == "\nint x;``` b ```cpp\nint y;\n"
    assert cpp.extract("```cpp\nint x;") is None
    assert score("no program").aux == {"extraction_rate": 0.0, "no_answer": 1.0}


@compiles
def test_a_right_program_passes_and_a_broken_one_does_not_compile():
    right = score("Here:\n```cpp\n" + "\n".join(ROWS[0]["code_lines"]) + "\n```\n")
    assert (right.value, right.partial, right.aux["tests"], right.aux["failed_test"]) == (1.0, 1.0, 2.0, -1.0)
    assert right.facts["verdict"] == "pass"
    assert right.facts["sandbox_tier"] in ("bwrap", "landlock", "container")
    broken = score("```cpp\nint main() { return x; }\n```")
    assert (broken.value, broken.facts["verdict"]) == (0.0, "compile_error")


NOSY = """
#include <cstdlib>
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>
int main() {
    string kind;
    cin >> kind;
    char* no[] = {0};
    if (kind == "loop") while (true) {}
    if (kind == "much") while (true) cout << string(4096, 'x');
    if (kind == "abort") { cout << "done" << endl; abort(); }
    if (kind == "read") cout << open("/etc/passwd", O_RDONLY) << endl;
    if (kind == "write") cout << open("/tmp/kvbench-nosy", O_CREAT | O_WRONLY, 0600) << endl;
    if (kind == "fork") cout << fork() << endl;
    if (kind == "exec") cout << execv("/bin/sh", no) << endl;
    if (kind == "connect") cout << socket(AF_INET, SOCK_STREAM, 0) << endl;
}
"""


@compiles
def test_what_a_program_may_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpp, "SECONDS", 0.5)
    binary = cpp.compiled(NOSY, choose(), GXX)
    assert binary.status == "ok"
    monkeypatch.setattr(cpp, "_check", lambda sandbox: GXX)
    monkeypatch.setattr(cpp, "compiled", lambda *_: binary)
    refused = [([kind], ["-1"]) for kind in ("read", "write", "fork", "exec", "connect")]
    assert cpp.grade("", [*refused, (["abort"], ["done"])], choose()).verdict == "pass"
    assert cpp.grade("", [(["read"], ["3"])], choose()) == cpp.Verdict("wrong_answer", 0)
    assert cpp.grade("", [*refused[:1], (["loop"], ["x"])], choose()) == cpp.Verdict("time_limit", 1)
    assert cpp.grade("", [(["much"], ["x"])], choose()).verdict == "output_limit"


@compiles
@pytest.mark.parametrize(
    ("outcomes", "status", "verdict"),
    [
        (["full", "full", "full"], "sandbox_error", None),
        (["slow", "slow", "slow"], "sandbox_error", None),
        (["slow", "right"], "grader_error", "pass"),  # the status is only that of a score without a value
        (["slow", "slow", "right"], "grader_error", "compile_error"),
        (["wrong"], "grader_error", "compile_error"),
    ],
)
def test_a_machine_that_fails_to_compile_is_no_wrong_answer(
    outcomes: list[str], status: str, verdict: str | None, monkeypatch: pytest.MonkeyPatch
):
    cpp.require()
    text = "```cpp\n" + "\n".join(ROWS[0]["code_lines"]) + "\n```"
    kinds = {
        "full": Outcome(status="runtime_error", stderr=b"<stdin>:1:1: fatal error: error writing to ./a.s: No space"),
        "slow": Outcome(status="time_limit"),
        "wrong": Outcome(status="runtime_error", stderr=b"<stdin>: In function:\n<stdin>:3:4: error: no x\n"),
        "right": cpp.compiled(cpp.extract(text) or "", choose(), GXX),
    }
    left = [kinds[name] for name in outcomes]
    monkeypatch.setattr(cpp, "compiled", lambda *_: left.pop(0))
    scored = score(text)
    assert left == []
    assert (scored.status, scored.facts.get("verdict")) == (status, verdict)
    assert scored.value == (None if status == "sandbox_error" else float(verdict == "pass"))


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A path where a test may write another g++; its folder is first on PATH, and every user may read it."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        monkeypatch.setenv("PATH", folder, prepend=":")
        cpp._check.cache_clear()
        yield Path(folder, "g++")
    cpp._check.cache_clear()


@compiles
def test_the_compiler_is_the_first_on_the_path(other: Path):
    other.write_text(f'#!/bin/sh\nexec {GXX} -DOTHER "$@"\n')
    other.chmod(0o755)
    assert cpp._check(choose()) == str(other)
    assert cpp.compiled("#ifndef OTHER\n#error\n#endif\nint main() {}", choose(), str(other)).status == "ok"


@compiles
def test_a_compiler_that_cannot_link_gives_way_or_is_a_line(other: Path, monkeypatch: pytest.MonkeyPatch):
    other.write_text("#!/bin/sh\necho 'ld: cannot find -lstdc++' >&2\nexit 1\n")
    other.chmod(0o755)
    if GXX in toolchain.compilers():  # the system's
        assert cpp._check(choose()) == GXX
        cpp._check.cache_clear()
    monkeypatch.setattr(toolchain, "compilers", lambda: [str(other)])
    with pytest.raises(SetupError, match=r"program in the sandbox \(ld: cannot find -lstdc\+\+\)\. If"):
        get_task("longproc_pseudo_to_code").require()


@compiles
def test_a_compiler_that_does_not_start_is_named(other: Path, monkeypatch: pytest.MonkeyPatch):
    other.write_text("#!/nowhere/sh\n")
    other.chmod(0o755)
    monkeypatch.setattr(toolchain, "compilers", lambda: [str(other)])
    with pytest.raises(SetupError, match=re.escape(f"(cannot start {other}: No such file or directory)")):
        cpp.require()


def test_no_compiler_is_a_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(toolchain, "compilers", list)
    cpp._check.cache_clear()
    with pytest.raises(SetupError, match=r"need the compiler g\+\+, which is not installed"):
        get_task("longproc_pseudo_to_code").require()


@compiles
@pytest.mark.parametrize(("tests", "message"), [([], "'testcases' is empty"), ([["1"]], "row 1, have a value")])
def test_wrong_rows_get_a_line(tmp_path: Path, tests: list, message: str):
    (tmp_path / "longproc").mkdir()
    row = json.dumps(ROWS[0] | {"testcases": tests})
    (tmp_path / "longproc" / "pseudo_to_code_0.5k.jsonl").write_text(row, encoding="utf-8")
    with pytest.raises(SetupError, match=message):
        get_task("longproc_pseudo_to_code").docs(Data(tmp_path, env={}, allow_mismatch=True))
