"""Standard streams that are full, gone or closed (F29)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvbench.store import RunFolder

FULL = "error: cannot write to standard output (no space left on device). Redirect it elsewhere.\n"
CLOSED = "error: cannot write to standard output (it is closed). Redirect it, for example to /dev/null.\n"
needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one row."""
    path = tmp_path_factory.mktemp("streams")
    versions = {"kvbench_version": "0", "torch_version": "0", "transformers_version": "0"}
    with RunFolder.open(path / "results", "r1", {}, environment=versions, planned=1) as run:
        with run.journal() as journal:
            row = {"row_key": "k", "task": "walk", "method": "full", "doc_id": "q", "sample": 0, "model": "tiny"}
            journal.append({**row, "status": "ok", "score": 1.0, "seed": 0}, prompt="p", output="o")
        run.seal()
    return path


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    line = command.replace("kvbench", f"{sys.executable} -m kvbench", 1)
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=folder, timeout=600)


@needs_full
@pytest.mark.parametrize("line", ["report r1", "report r1 --format json", "list methods", "show r1", "--help"])
def test_a_full_device_is_an_error_of_the_surroundings(folder: Path, line: str) -> None:
    done = shell(f"kvbench {line} > /dev/full", folder)
    assert (done.returncode, done.stderr) == (3, FULL)


@pytest.mark.parametrize("line", ["report r1", "report r1 --format json", "list methods", "show r1", "--version"])
def test_a_closed_standard_output_is_an_error_of_the_surroundings(folder: Path, line: str) -> None:
    done = shell(f"kvbench {line} >&-", folder)
    assert (done.returncode, done.stderr) == (3, CLOSED)


def test_a_closed_standard_output_does_not_hide_another_error(folder: Path) -> None:
    done = shell("kvbench report absent >&-", folder)
    assert done.returncode == 2
    assert "no run 'absent'" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("line", "code"), [("report r1", 3), ("report absent", 2), ("repair r1", 0), ("show r1", 3)])
def test_with_both_outputs_closed_the_exit_code_is_right(folder: Path, line: str, code: int) -> None:
    assert shell(f"kvbench {line} >&- 2>&-", folder).returncode == code


@needs_full
def test_messages_that_cannot_be_written_do_not_change_the_outcome(folder: Path) -> None:
    assert shell("kvbench report absent 2> /dev/full", folder).returncode == 2
    assert shell("kvbench report r1 2> /dev/full", folder).returncode == 0


OPENED = """
import os, sys
from kvbench.console import terminal
terminal.prepare()
print("lost", file=sys.stderr)
os.write(1, b"of a library"), os.write(2, b"of a library")
file = os.open("rows", os.O_WRONLY | os.O_CREAT)
sys.exit(0 if file > 2 else file)
"""


def test_no_file_of_a_run_gets_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    """What a library prints would end up in the journal."""
    done = subprocess.run(["bash", "-c", f"{sys.executable} -c '{OPENED}' <&- >&- 2>&-"], cwd=tmp_path, timeout=600)
    assert done.returncode == 0
    assert (tmp_path / "rows").read_bytes() == b""


def test_a_reader_that_leaves_is_no_error(folder: Path) -> None:
    done = shell("kvbench list tasks | head -n 1; exit ${PIPESTATUS[0]}", folder)
    assert (done.returncode, done.stderr) == (0, "")
