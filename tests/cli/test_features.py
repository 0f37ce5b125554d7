"""Whole runs with shares, two methods, plug-ins, chunked prompts, query-agnostic compression; and how they go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from kvbench.store import read_rows

SMALL = "--task lookup --limit 2 --interval 8 --max-new-tokens 24 -q"
PLUGIN = """
from dataclasses import dataclass
from kvbench.eviction.api import Method, option
from kvbench.taskkit.math_task import MathTask
from kvbench.registry import methods, tasks
from kvbench.task import Manifest

@methods.register("newest")
@dataclass(frozen=True)
class Newest(Method):
    shift: int = option(3, "does nothing", low=0)

    def score(self, view):
        return view.positions.float()

@tasks.register("sums")
class Sums(MathTask):
    samples = 1
    max_new_tokens = 8
    manifest = Manifest(path="sums.jsonl", rows=2, hub="none/none", split="test")
"""
RUNS = {
    "shares": f"run --method full,knorm --budget 48,25% {SMALL} --json --run-name shares",
    "pair": f"run --method tova+gkv --method-opt gkv.window=4 --budget 25% {SMALL} --run-name pair",
    "chunked": f"run --method knorm --budget 48 --prefill chunked --prefill-chunk 64 {SMALL} --run-name chunked",
    "agnostic": f"run --method knorm --budget 48 --compress query-agnostic {SMALL} --run-name agnostic",
    "mine": "run --method newest --plugin mine.py --no-chat-template --budget 16 --task sums -q --run-name mine",
    "again": "run --resume mine --plugin mine.py -q --json",
    "no context": "run --method full --plugin mine.py --no-chat-template --task sums --compress query-agnostic",
    "unnamed": "report --format json",
    "named": "report broken",
    "typo": "show shares --sample lookup-8-1000000000 --method knrom",
    "absent": "show shares --sample lookup-8-1000000000 --method h2o",
    "sample": "show shares --sample lookup-8-1000000000 --method knorm",
    "run": "show pair",
}
VARIABLES = {"mine": {"KVBENCH_DATA": "data"}, "no context": {"KVBENCH_DATA": "data"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("features")
    (path / "mine.py").write_text(PLUGIN)
    (path / "data").mkdir()
    items = [{"id": f"s{i}", "problem": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(2)]
    (path / "data/sums.jsonl").write_text("\n".join(map(json.dumps, items)))
    (path / "results/broken").mkdir(parents=True)
    (path / "results/broken/run.json").write_text('{"format": 1')
    return path


@pytest.fixture(scope="module")
def outcomes(calls: Callable, folder: Path) -> dict:
    return dict(zip(RUNS, calls(folder, [(line.split(), VARIABLES.get(name, {})) for name, line in RUNS.items()])))


def rows_of(outcomes: dict, folder: Path, name: str) -> pd.DataFrame:
    assert outcomes[name].code == 0, outcomes[name].err
    return read_rows(folder / "results" / name)


def test_a_share_keeps_its_part_of_every_prompt(outcomes: dict, folder: Path) -> None:
    rows = rows_of(outcomes, folder, "shares")
    share = rows[rows["budget_share"] == 0.25]
    assert len(share) == 2
    assert (share["budget"] == (share["prompt_tokens"] * 0.25).round()).all()
    assert (share["entries_after_evict"] == share["budget"]).all()
    assert (rows[rows["budget"] == 48]["budget_share"].isna()).all()
    report = (folder / "results/shares/report/report.md").read_text()
    assert "| knorm | 25% |" in report
    assert "| knorm | 48 |" in report


def test_two_methods_are_one_cell(outcomes: dict, folder: Path) -> None:
    rows = rows_of(outcomes, folder, "pair")
    assert set(rows["method"]) == {"tova+gkv"}
    assert set(rows["method_version"]) == {"1+1"} or all("+" in v for v in rows["method_version"])
    assert json.loads(rows["options"].iloc[0])["gkv.window"] == 4
    assert rows["decode_bounded"].all()
    assert (rows["entries_after_evict"] == rows["budget"]).all()
    assert "| tova+gkv(gkv.window=4) | 25% |" in (folder / "results/pair/report/report.md").read_text()
    assert "tova+gkv(gkv.window=4) at 25% on lookup" in outcomes["run"].out


def test_a_chunked_prompt_needs_less_memory(outcomes: dict, folder: Path) -> None:
    whole, chunked = rows_of(outcomes, folder, "shares"), rows_of(outcomes, folder, "chunked")
    assert set(chunked["prefill"]) == {"chunked"}
    assert set(chunked["prefill_chunk"]) == {64}
    assert (chunked["entries_prefill_peak"] <= 48 + 64).all()
    full = whole[whole["method"] == "full"]
    assert (full["entries_prefill_peak"] == full["prompt_tokens"]).all()
    assert full["prefill"].isna().all()
    assert chunked["kv_bytes_prefill_peak"].max() < full["kv_bytes_prefill_peak"].min()


def test_a_query_agnostic_run_evicts_before_the_question(outcomes: dict, folder: Path) -> None:
    aware, agnostic = rows_of(outcomes, folder, "shares"), rows_of(outcomes, folder, "agnostic")
    assert set(agnostic["compress"]) == {"query-agnostic"}
    same = aware[(aware["budget"] == 48) & (aware["budget_share"].isna())]
    assert set(same["compress"]) == {"query-aware"}
    assert sorted(same["prompt_sha256"]) == sorted(agnostic["prompt_sha256"])
    assert not set(same["row_key"]) & set(agnostic["row_key"])
    assert (agnostic["first_eviction"] < agnostic["prompt_tokens"]).all()
    assert (same["first_eviction"] == same["prompt_tokens"]).all()


def test_a_plugin_runs_and_a_run_goes_on_without_the_variable_it_began_with(outcomes: dict, folder: Path) -> None:
    """Its task is scored in another process, and its data were named by KVBENCH_DATA only."""
    rows = rows_of(outcomes, folder, "mine")
    assert (len(rows), set(rows["method"]), set(rows["task"]), set(rows["status"])) == (2, {"newest"}, {"sums"}, {"ok"})
    info = json.loads((folder / "results/mine/run.json").read_text())
    (plugin,) = info["environment"]["plugins"]
    assert plugin["path"].endswith("mine.py")
    again = outcomes["again"]
    assert again.code == 0, again.err
    assert json.loads(again.out)["rows_done"] == 2


def test_a_changed_plugin_is_refused(outcomes: dict, folder: Path, kvbench: Callable, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(PLUGIN)  # another place for the same file is all right
    same = kvbench("run", "--resume", "mine", "--plugin", str(tmp_path / "other.py"), "-q", cwd=folder)
    assert same.code == 0, same.err
    (tmp_path / "other.py").write_text(PLUGIN + "# changed\n")
    changed = kvbench("run", "--resume", "mine", "--plugin", str(tmp_path / "other.py"), "-q", cwd=folder)
    assert changed.code == 2
    assert "is none of the plug-ins that run 'mine' began with (mine.py " in changed.err
    assert "or start a new run (kvbench run --run-name)." in changed.err


def test_a_task_without_contexts_is_named(outcomes: dict) -> None:
    assert outcomes["no context"].code == 2
    assert "question 's0' of task 'sums' has no context" in outcomes["no context"].err


def test_one_damaged_run_does_not_hide_the_others(outcomes: dict) -> None:
    unnamed, named = outcomes["unnamed"], outcomes["named"]
    assert unnamed.code == 0, unnamed.err
    assert "warning: run 'broken' is left out: 'results/broken/run.json' is damaged." in unnamed.err
    groups = {table["group"] for table in json.loads(unnamed.out)["tables"]}
    assert any("compression query-agnostic" in group for group in groups)
    assert any("prefill chunked" in group for group in groups)
    assert (named.code, named.out) == (3, "")
    assert "is damaged" in named.err


@pytest.mark.parametrize("damage", ["cut", "edited"])
def test_no_command_advises_an_option_that_it_lacks(
    outcomes: dict, calls: Callable, folder: Path, tmp_path: Path, damage: str
) -> None:
    """Of all commands only `run` has --run-name, and not beside --resume: the option is named with its command."""
    path = tmp_path / "results" / "r1"
    path.mkdir(parents=True)
    text = (folder / "results/mine/run.json").read_text()
    (path / "run.json").write_text(text.replace('"seed": 0', '"seed": 1') if damage == "edited" else text[:-9])
    lines = ("report r1", "show r1", "score r1", "repair r1", "run --resume r1")
    for result in calls(tmp_path, [(line.split(), {}) for line in lines]):
        assert result.code in (2, 3)
        assert result.err.endswith(" or start a new run (kvbench run --run-name).\n")


def test_show_knows_the_methods_of_a_run(outcomes: dict) -> None:
    assert outcomes["typo"].code == outcomes["absent"].code == 2
    assert "run 'shares' has no method 'knrom'. Did you mean 'knorm'?" in outcomes["typo"].err
    assert "run 'shares' has no method 'h2o'. It has full, knorm." in outcomes["absent"].err
    assert "knorm at 42 (25%)" in outcomes["sample"].out
    assert "full" not in outcomes["sample"].out.splitlines()[0]


def test_the_command_that_continues_names_the_folder(tmp_path: Path) -> None:
    out = tmp_path / "my runs"
    line = "run --method full,gkv,knorm,tova --budget 32 --task walk/orbit-100 --limit 6 --interval 8 --slots 2"
    command = [sys.executable, "-m", "kvbench", *line.split(), "--run-name", "r1", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KVBENCH_NO_PROGRESS": "1"}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=pipe, stdout=pipe, text=True)
    deadline = time.monotonic() + 120
    while not any(p.stat().st_size > 4000 for p in out.glob("r1/journal/*")) and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert err.endswith(f"continue with kvbench run --resume r1 --out '{out}'\n")
