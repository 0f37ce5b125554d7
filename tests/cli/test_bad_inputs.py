"""Bad input ends in one clear line: exit code and key text of every row of data/bad_inputs.csv, and never a traceback.

Column `needs`: what a row needs around it. Rows with exit code 2 or 3 are found before torch is imported, unless they
need "torch", a "judge" or a missing "flash-attn". ids B001 to B106 are those of the list of bad inputs; rows of other
names are variants.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.bad_inputs import FIRST, SIGNALS, damaged_runs, fill, interrupted, repos
from support.folders import DATA
from support.hub import Hub, environment
from support.judges import KEY, Server, playing, send

ROWS = list(csv.DictReader((DATA / "bad_inputs.csv").open(encoding="utf-8", newline="")))
ALL = {f"{row['id']}-{number}": row for number, row in enumerate(ROWS)}
LIGHT = ("", "hub", "no hub", "no sandbox", "runs")
ABSENT = {"no flash-attn": "flash_attn", "no gptqmodel": "gptqmodel"}  # packages that a row must find missing
QUIET = {k: v for k, v in os.environ.items() if k != "COLUMNS"} | {"KVBENCH_NO_PROGRESS": "1", "OMP_NUM_THREADS": "1"}
NO_TIERS = """
import sys
from kvbench.cli.app import main
from kvbench.scoring.sandbox import selection
from kvbench.scoring.sandbox.tiers import Bwrap
selection.TIERS = (Bwrap,)  # as on a kernel without Landlock and a machine without containers
code = main(sys.argv[1:])
print("torch" in sys.modules, file=sys.stderr)
sys.exit(code)
"""


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str
    torch: bool | None = None


def argv(row: dict[str, str]) -> list[str]:
    words = shlex.split(row["argv"])
    return [word.replace("\\0", "\0").replace("\\x1b", "\x1b").replace("\\udce9", "\udce9") for word in words]


def variables(row: dict[str, str]) -> dict[str, str]:
    return dict(assignment.split("=", 1) for assignment in row["environment"].split())


def needing(*needs: str) -> dict[str, dict[str, str]]:
    """Rows, those that may import torch last."""
    chosen = {name: row for name, row in ALL.items() if row["needs"] in needs}
    return dict(sorted(chosen.items(), key=lambda item: item[1]["exit"] == "0"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bad")
    fill(path)
    return path


@pytest.fixture(scope="module")
def outcomes(calls: Callable, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Result of every row."""
    home = tmp_path_factory.mktemp("home")
    before = {p.name for p in folder.iterdir()}
    found: dict[str, Result] = {}

    def batch(rows: dict[str, dict[str, str]], more: dict[str, str] | None = None, first: tuple[str, ...] = ()) -> None:
        made = [(line.split(), {}) for line in first]
        lines = [(argv(row), (more or {}) | variables(row)) for row in rows.values()]
        found.update(zip(rows, calls(folder, made + lines)[len(made) :]))

    batch(needing(""))
    with Hub(repos()).running() as hub:
        batch(needing("hub"), environment(hub.url, home))
    batch(needing("no hub"), environment("http://127.0.0.1:9", home))
    for name, row in needing("no sandbox").items():
        found[name] = _without_sandbox(folder, row)
    for name, row in needing("process").items():
        found[name] = _run([sys.executable, "-m", "kvbench", *argv(row)], folder, variables(row))
    assert {p.name for p in folder.iterdir()} == before, "something was made where nothing was run"

    with playing(Server([send(401, json.dumps({"error": KEY}))])) as judge:
        rows = needing("torch", "judge", *ABSENT)
        rows = {name: row | {"argv": row["argv"].replace("{judge}", judge.url)} for name, row in rows.items()}
        batch(rows, {"JUDGE_KEY": KEY}, tuple(FIRST))
    for name, row in needing(*SIGNALS).items():
        found[name] = Result(*interrupted(folder, argv(row), SIGNALS[row["needs"]]))
    with damaged_runs(folder / "results"):
        batch(needing("runs", "signal"))
        batch(needing("runs torch"))
    for name, row in needing("runs pipe").items():
        command = f"{sys.executable} -m kvbench {row['argv']}; exit ${{PIPESTATUS[0]}}"
        found[name] = _run(["bash", "-c", command], folder, {})
    return found


def _run(command: list[str], folder: Path, variables: dict[str, str]) -> Result:
    done = subprocess.run(command, capture_output=True, cwd=folder, env=QUIET | variables, timeout=600)
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


def _without_sandbox(folder: Path, row: dict[str, str]) -> Result:
    done = _run([sys.executable, "-c", NO_TIERS, *argv(row)], folder, {"PATH": "/nowhere"})
    *lines, torch = done.err.splitlines()
    return Result(done.code, done.out, "\n".join(lines), torch == "True")


@pytest.mark.parametrize(("name", "row"), list(ALL.items()), ids=list(ALL))
def test_bad_input(name: str, row: dict[str, str], outcomes: dict[str, Result]) -> None:
    if (package := ABSENT.get(row["needs"])) and importlib.util.find_spec(package):
        pytest.skip(f"the package {package} is installed here")
    result = outcomes[name]
    said = result.out + result.err
    assert result.code == int(row["exit"]), said
    for text in row["texts"].split(" || "):
        assert text in (result.err if row["exit"] not in ("0", "4") else said)
    assert "Traceback (most recent" not in said
    assert "internal error" not in said
    assert KEY not in said
    assert not any(ord(c) < 32 and c != "\n" for c in result.err)
    if row["exit"] in ("2", "3", "6"):
        assert result.out == ""
        assert all(line.startswith(("error: ", "warning: ", "note: ")) for line in result.err.splitlines())
        if row["needs"] in LIGHT:
            assert result.torch is False, "torch was imported before a usage error was found"


def test_every_bad_input_of_the_list_is_driven() -> None:
    wanted = {f"B{number:03}" for number in range(1, 107)}
    assert wanted <= {row["id"] for row in ROWS}


def test_the_first_line_of_several_is_not_repeated(outcomes: dict[str, Result]) -> None:
    result = next(outcomes[name] for name, row in ALL.items() if row["id"] == "several")
    lines = result.err.splitlines()
    assert len(lines) == len(set(lines)) == 5


def test_what_was_refused_left_no_folder(outcomes: dict[str, Result], folder: Path) -> None:
    """B032, B051, B052 and the like: only runs that made rows have folders."""
    made = {path.name for path in (folder / "results").iterdir()}
    asked = {"r1", "r2", "judged", "long", "stopped", "ended", "busy", "stale", "newer", "halved", "foreign"}
    asked |= {"five", "ours", "theirs", "latin"}
    assert made <= asked | {name for name in made if name.startswith("other-")}  # B055: told with the weights at hand


def test_a_link_to_a_folder_is_followed_and_files_in_it_stay(outcomes: dict[str, Result], folder: Path) -> None:
    """B085."""
    assert (folder / "target/keep.txt").read_text() == "mine"
    assert (folder / "target/r1/run.json").is_file()


def test_the_record_has_the_file_s_value_and_the_flag_s(outcomes: dict[str, Result], folder: Path) -> None:
    """B102."""
    info = json.loads((folder / "results/r1/run.json").read_text())
    assert info["config"]["seed"] == 0
    assert [entry["value"] for entry in info["environment"]["sources"]["seed"]] == [5, "0"]


def test_a_narrow_or_plain_terminal_gets_what_it_can_show(outcomes: dict[str, Result]) -> None:
    """B103, B104."""
    shown = {row["id"]: outcomes[name].out for name, row in ALL.items() if row["needs"] == "process"}
    assert shown["B103"].isascii()
    assert max(map(len, shown["B104"].splitlines())) < 80


def test_the_list_names_what_every_row_needs() -> None:
    known = {
        *LIGHT,
        "process",
        "torch",
        "judge",
        *ABSENT,
        "runs torch",
        "runs pipe",
        "signal",
        *SIGNALS,
    }
    assert {row["needs"] for row in ROWS} <= known
