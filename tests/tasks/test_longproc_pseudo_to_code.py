"""LongProc's pseudo_to_code: prompts of made rows, programs compiled and run in a sandbox, and what they can do."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from support.folders import DATA

from kvbench.errors import SetupError
from kvbench.scoring.longproc import cpp
from kvbench.scoring.sandbox import choose
from kvbench.sources.data import BUNDLED, Data
from kvbench.task import Output, Score
from kvbench.taskkit.names import get_task

SOURCE = Data(DATA / "tasks", env={})
FILE = DATA / "tasks" / "longproc" / "pseudo_to_code_0.5k.sample.jsonl"
ROWS = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


compiles = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


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
    binary = cpp.compiled(NOSY)
    assert binary is not None
    monkeypatch.setattr(cpp, "_check", lambda sandbox: None)
    monkeypatch.setattr(cpp, "compiled", lambda program: binary)
    refused = [([kind], ["-1"]) for kind in ("read", "write", "fork", "exec", "connect")]
    assert cpp.grade("", [*refused, (["abort"], ["done"])], choose()).verdict == "pass"
    assert cpp.grade("", [(["read"], ["3"])], choose()) == cpp.Verdict("wrong_answer", 0)
    assert cpp.grade("", [*refused[:1], (["loop"], ["x"])], choose()) == cpp.Verdict("time_limit", 1)
    assert cpp.grade("", [(["much"], ["x"])], choose()).verdict == "output_limit"


@compiles
def test_no_process_of_the_compiler_outlives_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Including a pipe that nobody writes to blocks a process that g++ has started."""
    os.mkfifo(pipe := tmp_path / "pipe")
    monkeypatch.setattr(cpp, "COMPILE_SECONDS", 2.0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert cpp.compiled(f'#include "{pipe}"\nint main() {{}}') is None
    assert any(not _work_in(tmp_path) or time.sleep(0.1) for _ in range(100))


def _work_in(folder: Path) -> list[str]:
    """The processes whose working folder lies in this one."""
    found = []
    for process in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            found += [process] if os.readlink(f"/proc/{process}/cwd").startswith(str(folder)) else []
    return found


def test_no_compiler_is_a_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cpp.shutil, "which", lambda name: None)
    with pytest.raises(SetupError, match=r"need the compiler g\+\+, which is not installed"):
        get_task("longproc_pseudo_to_code").docs(SOURCE)


@compiles
@pytest.mark.parametrize(("tests", "message"), [([], "'testcases' is empty"), ([["1"]], "row 1, have a value")])
def test_wrong_rows_get_a_line(tmp_path: Path, tests: list, message: str):
    (tmp_path / "longproc").mkdir()
    row = json.dumps(ROWS[0] | {"testcases": tests})
    (tmp_path / "longproc" / "pseudo_to_code_0.5k.jsonl").write_text(row, encoding="utf-8")
    with pytest.raises(SetupError, match=message):
        get_task("longproc_pseudo_to_code").docs(Data(tmp_path, env={}, allow_mismatch=True))
