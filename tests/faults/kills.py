"""kill -9: anywhere in the work, at every step of making tables, and while run.json is written. F01 to F03."""

from __future__ import annotations

import json
import os
import shutil
import signal

import pyarrow.parquet as pq
from faults.stage import ROWS, RUN, Stage, scenario, segment_of
from support.commands import Before, Tell, at_steps
from tools.kills import SEALING, Campaign

from kvbench.store import read_texts


@scenario("F01")
def at_a_random_moment(stage: Stage) -> None:
    """Runs, resumes, scoring and sealing, each killed at least once."""
    kills = stage.repetitions(5)
    campaign = Campaign(stage.folder, kills=kills, seed=1, limit=3, samples=2)
    tallies = campaign.run()
    assert sum(tally.kills for tally in tallies.values()) == kills
    assert all(tally.kills for tally in tallies.values())
    assert sum(tally.acknowledged for tally in tallies.values()) > 0
    for kind, tally in tallies.items():
        assert (kind, tally.lost, tally.different) == (kind, 0, [])


@scenario("F02")
def while_tables_are_made(stage: Stage) -> None:
    """The tables lack the last row, which is generated again; then the process is killed at a step of sealing."""
    before = stage.folder / "before"
    shutil.copytree(stage.undisturbed, before)
    segment = segment_of(before)
    os.truncate(segment, segment.stat().st_size - 10)
    shutil.copytree(before, stage.run_dir)
    stage.done("repair r1")
    shutil.rmtree(before)
    stage.run_dir.rename(before)
    for number in range(stage.repetitions(len(SEALING))):
        step = SEALING[number % len(SEALING)]
        shutil.copytree(before, stage.run_dir)
        assert stage.call("run --resume r1 -q", kill_at(step)).code == -signal.SIGKILL, step
        for name in ("rows.parquet", "texts.parquet"):
            assert len(pq.read_table(stage.run_dir / name)) in (ROWS - 1, ROWS), step
        assert len(stage.rows()) == len(read_texts(stage.run_dir)) == ROWS, step
        stage.done("run --resume r1 -q")
        stage.check_final()
        assert not [p for p in stage.run_dir.iterdir() if p.name.endswith(".tmp") or p.name == "lock"], step
        shutil.rmtree(stage.run_dir)


@scenario("F03")
def while_run_json_is_written(stage: Stage) -> None:
    for step in ("run.json opened", "run.json written", "run.json replaced"):
        assert stage.call(RUN, kill_at(step)).code == -signal.SIGKILL
        there = (stage.run_dir / "run.json").exists()
        assert there == (step == "run.json replaced")
        shown = stage.call("show r1")
        assert (shown.code, "no run" in shown.err) == ((0, False) if there else (2, True)), shown
        if there:
            assert json.loads((stage.run_dir / "run.json").read_text())["planned"] == ROWS
        assert "has ended" in stage.done(RUN).err  # the dead owner of the lock
        stage.check_final()
        assert {p.name for p in stage.run_dir.iterdir() if p.is_file()} == {
            *("run.json", "rows.parquet", "texts.parquet", "seal.json"),
        }
        shutil.rmtree(stage.run_dir)


def kill_at(step: str) -> Before:
    """kill -9 at a step of the store's writes."""

    def before(tell: Tell) -> None:
        at_steps(lambda name: os.kill(os.getpid(), signal.SIGKILL) if name == step else None)

    return before
