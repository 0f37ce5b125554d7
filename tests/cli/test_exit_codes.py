"""What is missing or wrong decides between exit codes 2 and 3, not the command (docs/commands.md): folders, files."""

from __future__ import annotations

import csv
import shlex
from collections.abc import Callable

import pytest
from support.folders import DATA

ROWS = [tuple(row.values()) for row in csv.DictReader((DATA / "exit_codes.csv").open(encoding="utf-8", newline=""))]


@pytest.fixture(scope="module")
def outcomes(calls: Callable, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """Exit code, output and messages of every row, in a folder with an empty folder and a file of text."""
    folder = tmp_path_factory.mktemp("codes")
    (folder / "empty").mkdir()
    (folder / "file").write_text("text\n")
    results = calls(folder, [(shlex.split(line), {}) for _, line, _ in ROWS])
    made = {path.name for path in folder.iterdir()}
    return {line: (r.code, r.out, r.err) for (_, line, _), r in zip(ROWS, results, strict=True)} | {
        "": (0, "", str(made))
    }


@pytest.mark.parametrize(("code", "line", "text"), ROWS, ids=[line for _, line, _ in ROWS])
def test_missing_and_wrong_places(code: str, line: str, text: str, outcomes: dict[str, tuple[int, str, str]]) -> None:
    was, out, err = outcomes[line]
    assert was == int(code), err
    assert text in err
    assert out == ""
    assert err.splitlines()[-1].startswith("error: ")  # lm-eval tells more before it


def test_no_run_and_no_report_is_made(outcomes: dict[str, tuple[int, str, str]]) -> None:
    assert "results" not in outcomes[""][2]
