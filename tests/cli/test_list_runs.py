"""``kvbench list runs``: what each run is and how far it came, also beside folders that are damaged or hostile."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli.app import main
from kvbench.report.runs import described
from kvbench.store import RunFolder

CONFIG = {
    "model": "tiny",
    "grids": [
        {
            "methods": [{"name": n, "options": {}} for n in ("full", "gkv", "rkv", "h2o")],
            "budgets": [48],
            "tasks": ["walk"],
        }
    ],
}


def make(results: Path, name: str, statuses: list[str], planned: int, **config: Any) -> Path:
    versions = {"kvbench_version": "0", "torch_version": "0", "transformers_version": "0"}
    with RunFolder.open(results, name, CONFIG | config, environment=versions, planned=planned) as run:
        with run.journal() as journal:
            for number, status in enumerate(statuses):
                row = {"row_key": f"{name}{number}", "task": "walk", "doc_id": f"q{number}", "sample": 0}
                row |= {"method": "gkv", "status": status, "score": 1.0 if status == "ok" else None}
                journal.append(row, prompt="p", output="o")
        if len(statuses) == planned:
            run.seal()
        return run.path


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    make(folder, "done", ["ok", "ok"], 2)
    make(folder, "half", ["ok"], 4)
    make(folder, "lost", ["ok", "oom", "unscored"], 3)
    return folder


def test_each_run_says_how_far_it_came(results: Path) -> None:
    found = {entry["name"]: (entry["rows"], entry["status"]) for entry in described(results)}
    assert found == {
        "done": ("2 of 2", "complete"),
        "half": ("1 of 4", "unfinished"),
        "lost": ("2 of 3", "1 not scored, 1 failed"),
    }
    (first, *_) = described(results)
    assert (first["model"], first["tasks"], first["methods"]) == ("tiny", ["walk"], ["full", "gkv", "rkv", "h2o"])


def test_runs_are_told_apart_by_options_budgets_and_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    grid = {"methods": [{"name": "gkv", "options": {"lam": 0.0}}], "budgets": [32, "25%"], "tasks": ["walk"]}
    make(tmp_path, "r1", ["ok"], 1, grids=[grid], limit=8, interval=128, temperature=None)
    [entry] = described(tmp_path)
    assert (entry["methods"], entry["budgets"], entry["settings"]) == (["gkv(lam=0.0)"], ["32", "25%"], "limit 8")
    assert main(["list", "runs", "--out", str(tmp_path)]) == 0
    line = capsys.readouterr().out.splitlines()[-1].split("  ")
    assert [part.strip() for part in line if part.strip()][:-1] == [
        *("r1", "tiny", "gkv(lam=0.0)", "32, 25%", "walk", "limit 8", "1"),
    ]


def test_damaged_and_hostile_folders_are_entries_too(
    results: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shutil.copytree(results / "done", results / "bad")
    (results / "bad/run.json").write_text("{")
    shutil.copytree(results / "done", results / "cut")
    (results / "cut/rows.parquet").write_bytes(b"PAR1")
    shutil.copytree(results / "done", results / "linked")
    (results / "linked/run.json").unlink()
    os.symlink(results / "done/run.json", results / "linked/run.json")
    make(results, "escapes", ["ok"], 1, model="\x1b[2J\u202etiny")
    (results / "stray").mkdir()
    found = {entry["name"]: entry["status"] for entry in described(results)}
    assert all(found[name] == "cannot be read" for name in ("bad", "cut", "linked"))
    assert found["done"] == found["escapes"] == "complete"
    assert "stray" not in found
    assert main(["list", "runs", "--out", str(results)]) == 0
    shown, told = capsys.readouterr()
    assert [line.split(":")[1] for line in told.splitlines()] == [f" run '{name}'" for name in ("bad", "cut", "linked")]
    assert not any(ord(sign) < 32 and sign != "\n" for sign in shown + told)
    assert "\u202e" not in shown
    assert "full, gkv, rkv and 1 more" in " ".join(shown.split())


def test_json_and_wrong_usage(results: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["list", "runs", "--out", str(results), "--json"]) == 0
    assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == ["done", "half", "lost"]
    for argv, words in {
        ("list", "runs", "done"): "'kvbench show done' shows one run.",
        ("list", "runs", "--out", str(tmp_path / "none")): "there is no folder",
        ("list", "methods", "--out", "x"): "use it with 'kvbench list runs'",
    }.items():
        assert main([*argv]) == 2
        assert words in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["list", "runs", "--out", str(tmp_path / "empty")]) == 0
    assert "there are no runs in" in capsys.readouterr().err


def test_no_torch(results: Path) -> None:
    code = f"import sys; from kvbench.cli.app import main; main(['list', 'runs', '--out', {str(results)!r}]); "
    check = code + "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], capture_output=True).returncode == 0
