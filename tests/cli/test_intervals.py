"""Methods at intervals of their own in one run: cells, rows, reports, replays, and the warning from weights' cards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest

from kvbench import tiny
from kvbench.compare.baseline import read
from kvbench.config.layers import gather
from kvbench.config.run_config import Grid, MethodChoice, RunConfig
from kvbench.console.problems import Problems
from kvbench.errors import UserError
from kvbench.eviction.choose import make
from kvbench.runner import trained_at
from kvbench.sources import models

FILE = """
[run]
method = ["full", "gkv"]
budget = 32
interval = 32
limit = 2
task = "walk/orbit-100"
[[grid]]
[[grid]]
method = ["foresightkv", "knorm"]
interval = [16, 32]
"""
SESSION = {
    "plan": "run --config c.toml --dry-run --json",
    "run": "run --config c.toml --run-name r1 --json",
    "again": "run --config c.toml --run-name r1 -q --json",
    "resumed": "run --resume r1 --interval 16,32 -q",
    "other": "run --resume r1 --interval 32 -q",
    "flag": "run --config c.toml --interval 32 --dry-run --json",
    "fitting": "run --method foresightkv --budget 48 --interval 32 --task walk/orbit-100 --limit 1 --dry-run -q",
    "share": "run --method foresightkv --budget 90% --interval 32 --task walk/orbit-100 --limit 1 --dry-run -q",
    "untuned": "run --method lookaheadkv,trimkv --budget 32 --interval 16 --task lookup --limit 1 --dry-run -q",
    "alone": "run --method foresightkv --budget 32 --interval 16 --task walk/orbit-100 --limit 2 --run-name r2 -q",
    "report": "report results/r1 --json",
    "grouped": "report results/r1 --group-by interval --json",
    "text": "report results/r1",
    "runs": "list runs --json",
    "replay": "replay --run r1 --method gkv --budget 32 --interval 16,32 --limit 1 --out replayed -q --json",
    "analysis": "replay --run r1 --analysis tokens --method gkv --budget 32 --interval 16,32 --limit 1 -q",
    "attention": "replay --config c.toml --analysis patterns --limit 1 -q --json",
    "decisions": "compare r1 --save kept.json --replay",
    "bad": "run --method gkv --budget 32 --interval 16,x --task walk",
    "comma": "run --method gkv --budget 32 --interval 16, --task walk",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("intervals")
    (path / "c.toml").write_text(FILE)
    return path


@pytest.fixture(scope="module")
def session(folder: Path, calls: Callable) -> dict:
    found = dict(zip(SESSION, calls(folder, [(line.split(), {}) for line in SESSION.values()])))
    assert {name for name, result in found.items() if result.code} == {"other", "bad", "comma", "analysis"}
    return found


def last(result) -> dict:
    return json.loads(result.out.splitlines()[-1])


def intervals(result) -> list[tuple[str, int | None]]:
    return [(cell["method"], cell["interval"]) for cell in last(result)["plan"]]


def test_a_block_has_its_own_intervals_and_a_flag_replaces_them(session: dict) -> None:
    assert intervals(session["plan"]) == [
        ("full", None), ("gkv", 32), ("foresightkv", 16), ("foresightkv", 32), ("knorm", 16), ("knorm", 32),
    ]  # fmt: skip
    assert intervals(session["flag"]) == [("full", None), ("gkv", 32), ("foresightkv", 32), ("knorm", 32)]
    assert "--interval must be a whole number, 1 or more; got 'x'." in session["bad"].err
    assert "--interval has an empty item at position 2" in session["comma"].err


def test_rows_name_their_interval_and_the_run_continues(session: dict, folder: Path) -> None:
    rows = pd.read_parquet(folder / "results" / "r1" / "rows.parquet")
    assert last(session["run"])["rows_done"] == last(session["run"])["rows_planned"] == len(rows) == 12
    found = set(zip(rows["method"], rows["interval"].fillna(0).astype(int)))
    assert found == {("full", 0), ("gkv", 32), ("foresightkv", 16), ("foresightkv", 32), ("knorm", 16), ("knorm", 32)}
    held = rows[rows["method"] == "knorm"].groupby("interval")["entries_peak"].max()
    assert held[16] <= 32 + 16 < held[32] <= 32 + 32
    assert "--interval 32 differs from the run's 16,32." in session["other"].err
    assert "warning: run 'r1' is not finished" not in session["text"].err


def test_a_row_is_the_same_in_a_run_of_its_interval_alone(session: dict, folder: Path) -> None:
    mixed, alone = (pd.read_parquet(folder / "results" / run / "rows.parquet") for run in ("r1", "r2"))
    mine = mixed[(mixed["method"] == "foresightkv") & (mixed["interval"] == 16)]
    assert sorted(mine["row_key"]) == sorted(alone["row_key"])


def test_reports_keep_intervals_apart_and_say_so(session: dict) -> None:
    document = last(session["report"])
    assert [(t["group"], {c["interval"] for c in t["cells"]} - {None}) for t in document["tables"]] == [
        ("interval 16", {16}), ("interval 32", {32}),
    ]  # fmt: skip
    assert all("full" in {cell["method"] for cell in table["cells"]} for table in document["tables"])
    assert [table["cells"] for table in last(session["grouped"])["tables"]] == [t["cells"] for t in document["tables"]]
    said = "Rows at intervals 16 and 32 stand in separate tables; methods are compared within an interval."
    assert document["apart"] == [said]
    assert said in session["text"].out.replace("\n", " ")
    assert "apart" not in last(session["grouped"])
    entry = next(run for run in json.loads(session["runs"].out) if run["name"] == "r1")
    assert "interval [16,32]" in entry["settings"]
    assert entry["status"] == "complete"


def test_a_replay_compares_each_interval(session: dict, folder: Path) -> None:
    rows = last(session["replay"])["rows"]
    assert [(row["interval"], row["method"]) for row in rows if row["method"] == "gkv"] == [(16, "gkv"), (32, "gkv")]
    assert {row["method"] for row in rows} == {"gkv", "golden", "random"}
    assert last(session["replay"])["settings"]["interval"] == [16, 32]
    heads = pd.read_parquet(folder / "replayed" / "heads.parquet")
    assert set(heads["interval"]) == {16, 32}
    assert "--analysis takes a single interval, not 16, 32." in session["analysis"].err


def test_the_interval_has_no_effect_on_an_analysis_of_attention(session: dict) -> None:
    rows = last(session["attention"])["analyses"]["patterns"]
    assert rows
    assert len(rows) == len({(row["task"], row["layer"], row["head"]) for row in rows})


def test_decisions_are_recorded_at_the_interval_of_each_cell(session: dict, folder: Path) -> None:
    cells = {(key.method, key.interval): cell for key, cell in read(folder / "kept.json").cells.items()}
    for interval in (16, 32):
        decisions = cells["knorm", interval].decisions
        assert len(decisions) == 2
        for _, ticks in decisions.values():
            assert {after - before for before, after in pairwise(sorted(ticks))} == {interval}


def test_one_warning_where_the_card_names_another_budget_or_interval(session: dict) -> None:
    def warnings(name: str) -> list[str]:
        return [line for line in session[name].err.splitlines() if "its weights were trained for" in line]

    (line,) = warnings("run")
    assert line.startswith("warning: method 'foresightkv': its weights were trained for budget 48, interval 32 (")
    assert line.endswith("this run has budget 32, interval 16, 32, at which the method may score lower.")
    assert not warnings("fitting") + warnings("share")
    assert not warnings("untuned")  # lookaheadkv's training has no budget, and trimkv's no interval
    assert len(warnings("alone")) == 1


@pytest.mark.parametrize(("budget", "interval", "told"), [(48, 32, 0), (96, 64, 0), (96, 32, 1)])
def test_a_scorer_that_was_trained_at_two_budgets_suits_both(
    budget: int, interval: int, told: int, tmp_path: Path
) -> None:
    for name in ("foresightkv.json", "foresightkv.safetensors"):
        shutil.copy(tiny.path() / name, tmp_path)
    card = json.loads((tmp_path / "foresightkv.json").read_text())
    card["made"]["trained_at"] |= {"long": 100, "long_budget": 96, "long_interval": 64}
    (tmp_path / "foresightkv.json").write_text(json.dumps(card))
    choice = MethodChoice(name="foresightkv")
    config = RunConfig(grids=(Grid(methods=(choice,), budgets=(budget,), tasks=("walk",)),), interval=interval)
    method = make("foresightkv", {"scorer": str(tmp_path)})
    found = list(trained_at.warnings(config, {choice: method}, models.describe("tiny")))
    assert len(found) == told
    assert all("trained for budget 48, interval 32 or budget 96, interval 64" in text for text in found)


def test_an_old_run_has_the_hash_and_the_record_that_it_had() -> None:
    gkv = (MethodChoice(name="gkv"),)
    plain = RunConfig(grids=(Grid(methods=gkv, budgets=(32,), tasks=("walk",)),), interval=32)
    assert "intervals" not in plain.to_dict()["grids"][0]
    own = RunConfig(grids=(Grid(methods=gkv, budgets=(32,), tasks=("walk",), intervals=(32,)),), interval=32)
    assert own.hash() == plain.hash()
    assert [cell.label for cell in own.cells()] == ["walk gkv @32"]
    two = RunConfig(grids=(Grid(methods=gkv, budgets=(32,), tasks=("walk",), intervals=(32, 1)),), interval=32)
    assert [cell.label for cell in two.cells()] == ["walk gkv @32", "walk gkv @32 every 1"]
    assert two.hash() != plain.hash()
    assert RunConfig.from_dict(json.loads(json.dumps(two.to_dict()))) == two
    with pytest.raises(UserError, match="'interval' must be 1 or more; got 0"):
        RunConfig(grids=(Grid(methods=gkv, budgets=(32,), tasks=("walk",), intervals=(0,)),))


def test_a_block_with_the_run_s_interval_is_no_other_cell(tmp_path: Path) -> None:
    from kvbench.cli.request import build

    (tmp_path / "c.toml").write_text(FILE)
    problems = Problems()
    config = build(gather({}, {"KVBENCH_INTERVAL": "8"}, None, tmp_path / "c.toml"), problems)
    problems.stop()
    assert config is not None
    assert (config.interval, config.intervals) == (8, (8,))
    assert [grid.intervals for grid in config.grids] == [(), ()]
