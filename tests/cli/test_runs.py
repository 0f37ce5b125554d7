"""Whole runs through the command line with the built-in model: results, continuing, refusing, interrupting."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbench import tiny
from kvbench.store import read_rows

SMALL = "--task walk/orbit-100 --limit 2 --interval 8 --max-new-tokens 24 --seed 0"
# One interpreter runs these one after the other: importing torch takes longer than the runs.
SESSION = {
    "first": f"run --config c.toml {SMALL} --run-name r1 --json",
    "again": f"run --config c.toml {SMALL} --run-name r1 --json",
    "resumed": "run --resume r1 --seed 0 -q",
    "other model": f"run --model ./copy --method knorm --budget 32 {SMALL} --run-name r2 -q",
    "plan": f"run --method full,knorm --budget 32 {SMALL} --dry-run -v",
    "plan json": f"run --method full,knorm --budget 32 {SMALL} --dry-run --json",
    "plan quiet": f"run --method full,knorm --budget 32 {SMALL} --dry-run -q",
    "B080": f"run --method knorm --budget 16 {SMALL} --run-name r1",
}
REFUSED = {
    "B082 seed": ("--resume r1 --seed 2", 2, "--seed 2 differs from the run's 0. A resumed run keeps its settings."),
    "B082 budget": ("--resume r1 --budget 16", 2, "--budget 16 differs from the run's 32."),
    "B082 method": ("--resume r1 --method h2o", 2, "--method h2o differs from the run's full,knorm."),
    "resume variable": ("--resume r1", 2, "environment variable KVBENCH_SEED=7 differs from the run's 0. A resumed"),
    "resume grid": ("--resume r1", 2, "environment variable KVBENCH_BUDGET=16 differs from the run's 32."),
    "resume default": ("--resume r1 --temperature 1", 2, "--temperature 1.0 differs from the run's default. A resumed"),
    "resume share": ("--resume r1 --budget 25%", 2, "--budget 25% differs from the run's 32."),
    "resume config": ("--resume r1 --config c.toml", 2, "c.toml:1: 'budget' cannot be given for an existing run."),
    "resume option": ("--resume r1 --method-opt window=8", 2, "--method-opt cannot be given for an existing run."),
    "B081": ("--resume r9", 2, "no run 'r9' in results. Runs there: r1, r2."),
    "two names": ("--resume r1 --run-name r2", 2, "--resume 'r1' and --run-name 'r2' name two runs"),
    "B079": (f"--method full {SMALL} --out /proc/nowhere", 3, "cannot write in '/proc/nowhere'"),
    "B078": (f"--method full {SMALL} --out results/r1/run.json", 2, "is a file; give a folder."),
    "B085": (f"--method full {SMALL} --out link", 2, "leads through a broken link"),
}
VARIABLES = {"resume variable": {"KVBENCH_SEED": "7"}, "resume grid": {"KVBENCH_BUDGET": "16"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs")
    (path / "c.toml").write_text('budget = 32\nseed = 5\nmethod = ["full", "knorm"]\n')
    shutil.copytree(tiny.path(), path / "copy", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (path / "link").symlink_to("nothing")
    return path


@pytest.fixture(scope="module")
def session(calls: Callable, folder: Path) -> dict:
    refused = {name: f"run {line}" for name, (line, _, _) in REFUSED.items()}
    lines = SESSION | refused
    return dict(zip(lines, calls(folder, [(line.split(), VARIABLES.get(name, {})) for name, line in lines.items()])))


def test_a_run_prints_tables_and_ends_with_one_json_document(session: dict, folder: Path) -> None:
    first = session["first"]
    assert first.code == 0, first.err
    lines = first.out.splitlines()
    document = json.loads(lines[-1])
    assert (document["rows_done"], document["rows_planned"], document["failed"]) == (4, 4, {})
    assert any("knorm" in line for line in lines[:-1])
    assert "note: no --model given: using the built-in model 'tiny'" in first.err
    assert {p.name for p in (folder / "results/r1/report").iterdir()} == {"report.md", "report.csv", "report.json"}


def test_the_record_holds_what_a_flag_overrode(session: dict, folder: Path) -> None:
    info = json.loads((folder / "results/r1/run.json").read_text())
    assert info["config"]["seed"] == 0
    assert info["environment"]["sources"]["seed"] == [
        {"source": "c.toml:2", "value": 5},
        {"source": "--seed", "value": "0"},
    ]


def test_the_same_command_again_runs_nothing(session: dict, folder: Path) -> None:
    assert session["again"].out == session["first"].out
    said = "note: nothing was run for 'results/r1': all 4 rows were there already.\n"
    assert said in session["again"].err
    assert said not in session["first"].err + session["resumed"].err  # the one ran, the other is quiet
    assert (session["resumed"].code, session["resumed"].out) == (0, "")
    assert len(list((folder / "results/r1/journal").iterdir())) == 1


def test_a_plan_runs_nothing_and_verbose_names_the_sources(session: dict, folder: Path) -> None:
    plan = session["plan"]
    assert plan.code == 0, plan.err
    assert "4 rows; nothing was run." in plan.out
    assert "tok/s at most: the limit that this machine's memory and arithmetic set" in plan.out
    speeds = [line.split()[-1].replace(",", "") for line in plan.out.splitlines() if line.startswith("walk")]
    assert len(speeds) == 2
    assert all(float(speed) == float(f"{float(speed):.2g}") for speed in speeds), "more digits than the probe knows"
    assert "note: seed = '0' from --seed" in plan.err
    assert not [p for p in (folder / "results").iterdir() if p.name not in ("r1", "r2")]


@pytest.mark.parametrize("name", ["B080", *REFUSED])
def test_what_a_run_refuses(session: dict, name: str) -> None:
    result = session[name]
    grids = (
        "holds a run with grids 'full, knorm at 32 on walk/orbit-100'; you asked for 'knorm at 16 on walk/orbit-100'."
    )
    _, code, text = REFUSED.get(name, ("", 2, grids.replace("'", "")))
    assert result.code == code, result.err
    assert text in (result.err if name in REFUSED else result.err.replace("'", ""))
    assert "Traceback" not in result.err
    assert result.out == ""


def test_models_are_not_mixed(session: dict, kvbench: Callable, folder: Path) -> None:
    assert session["other model"].code == 0, session["other model"].err
    mixed = kvbench("report", "r1", "r2", cwd=folder)
    assert mixed.code == 2
    assert "r1 has model tiny and r2 has model ./copy; scores are not comparable." in mixed.err
    assert "--group-by model makes separate tables." in mixed.err
    apart = kvbench("report", "r1", "r2", "--group-by", "model", "--format", "json", cwd=folder)
    assert len(json.loads(apart.out)["tables"]) == 2
    assert kvbench("report", "--format", "csv", cwd=folder).out.count("\n") == 4


def test_show(session: dict, kvbench: Callable, folder: Path) -> None:
    assert "4 of 4 rows" in kvbench("show", "r1", cwd=folder).out
    rows = read_rows(folder / "results/r1")
    question = rows["doc_id"].iloc[0]
    shown = kvbench("show", "results/r1", "--sample", question, "--json", cwd=folder)
    samples = json.loads(shown.out)["samples"]
    assert {s["method"] for s in samples} == {"full", "knorm"}
    assert all("Think:" in s["prompt"] and s["output"] for s in samples)
    assert (
        f"== walk/orbit-100 {question} sample 0: knorm at 32"
        in kvbench("show", "r1", "--sample", question, cwd=folder).out
    )
    assert kvbench("show", "r1", "--sample", "nope", cwd=folder).code == 2


def test_report_into_a_closed_pipe(session: dict, folder: Path) -> None:
    command = f"{sys.executable} -m kvbench report r1 | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=folder, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("env", [{"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, {"COLUMNS": "20"}])
def test_report_on_any_terminal(session: dict, kvbench: Callable, folder: Path, env: dict[str, str]) -> None:
    result = kvbench("report", "r1", cwd=folder, env=env)
    assert result.code == 0, result.err
    assert result.out.isascii() or "LC_ALL" not in env
