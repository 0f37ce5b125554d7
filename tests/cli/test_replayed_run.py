"""A run that is asked for again: in another order, by --resume, and by a replay with the settings of its blocks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbench.cli.commands.replay import OF_RUN
from kvbench.cli.replayed_run import of_run
from kvbench.config.run_config import Grid, MethodChoice, RunConfig
from kvbench.console.problems import Problems
from kvbench.store import RunFolder, manifest

FULL, GKV = MethodChoice(name="full"), MethodChoice(name="gkv")
BLOCKS = RunConfig(
    grids=(
        Grid(methods=(FULL,), tasks=("aime24",), limit=2, prompt_style="gkv"),
        Grid(methods=(GKV,), tasks=("aime24",), budgets=(48,), intervals=(16,), limit=2, prompt_style="gkv"),
        Grid(methods=(FULL, GKV), tasks=("aime25",), budgets=(48,), intervals=(32, 16)),
        Grid(methods=(FULL,), tasks=("walk",)),
    ),
    interval=64,
)
SMALL = "--task walk/orbit-100 --limit 1 --max-new-tokens 8 --interval 4 --run-name r1 -q --json"
COPIES = f"{SMALL} --samples 2 --temperature 0 --allow-duplicate-samples"
SESSION = {
    "run": f"run --method full,gkv --budget 32 {COPIES}",
    "swapped": f"run --method gkv,full --budget 32 {COPIES}",
    "blocks": f"run --config blocks.toml {COPIES}",
    "fewer": f"run --method gkv --budget 32 {COPIES}",
    "resumed": "run --resume r1 -q --json",
    "replayed": "replay --run r1 --method gkv --budget 32 -q --json",
}


@pytest.fixture
def replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunConfig]:
    """replayed(interval=["8"]): the configuration of ``kvbench replay --run r1 --method gkv --budget 48 ...``, of a run
    with the settings `BLOCKS`."""
    monkeypatch.chdir(tmp_path)
    RunFolder.open("results", "r1", BLOCKS.stored(), environment={}).close()

    def config(**typed: Any) -> RunConfig:
        given = {"run": "r1", "method": ["gkv"], "budget": ["48"]} | typed
        problems = Problems()
        found = of_run(dict.fromkeys((*OF_RUN, "plugin")) | given, problems)
        problems.stop()
        assert found is not None
        return found

    return config


def cells(config: RunConfig) -> list[tuple[str, int]]:
    return [(cell.task, config.interval_of(cell)) for cell in config.cells()]


def test_a_replay_has_the_intervals_limits_and_prompt_styles_of_the_run_s_blocks(
    replayed: Callable[..., RunConfig],
) -> None:
    config = replayed()
    assert cells(config) == [("aime24", 16), ("aime25", 32), ("aime25", 16), ("walk", 64)]
    styles = {task: (config.prompt_style_for(task), config.limit_for(task)) for task in config.tasks}
    assert styles == {"aime24": ("gkv", 2), "aime25": (None, None), "walk": (None, None)}


@pytest.mark.parametrize("interval", ["8", "64", "128"])
def test_an_interval_that_the_user_states_replaces_the_run_s(
    interval: str, replayed: Callable[..., RunConfig], tmp_path: Path
) -> None:
    assert cells(replayed(interval=[interval], task=["aime24"])) == [("aime24", int(interval))]
    (tmp_path / "c.toml").write_text(f'[[grid]]\ntask = "aime24"\ninterval = {interval}\n')
    assert cells(replayed(config="c.toml")) == [("aime24", int(interval))]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory, calls: Callable[..., Any]) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("again")
    (folder / "blocks.toml").write_text('[[grid]]\nmethod = "gkv"\nbudget = 32\n[[grid]]\nmethod = "full"\n')
    return dict(zip(SESSION, calls(folder, [(line.split(), {}) for line in SESSION.values()])))


@pytest.mark.parametrize("again", ["swapped", "blocks", "resumed"])
def test_the_same_cells_in_another_order_continue_the_run(session: dict[str, Any], again: str) -> None:
    assert session["run"].code == session[again].code == 0, session[again].err
    assert json.loads(session[again].out)["rows_done"] == 4
    told = "holds a run with grids full, gkv at 32 on walk/orbit-100; you asked for gkv at 32 on walk/orbit-100."
    assert told in session["fewer"].err


def test_a_run_with_copies_is_replayed(session: dict[str, Any]) -> None:
    assert session["replayed"].code == 0, session["replayed"].err


def test_a_message_tells_grids_apart() -> None:
    grids = [dataclasses.replace(BLOCKS, grids=(grid,)).to_dict()["grids"] for grid in BLOCKS.grids]
    assert [manifest.value(grid) for grid in grids] == [
        "full on aime24 (limit 2, prompt style gkv)",
        "gkv at 48 every 16 on aime24 (limit 2, prompt style gkv)",
        "full, gkv at 48 every 32, 16 on aime25",
        "full on walk",
    ]
