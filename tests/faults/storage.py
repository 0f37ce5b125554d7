"""Disks that are full, read-only, slow, or gone. F04, F05, F23, F24, F32."""

from __future__ import annotations

import os
import re
import resource
import shutil
import time
from pathlib import Path
from typing import Any

from faults.stage import NO_WEIGHTS, ROWS, RUN, Stage, scenario, segment_of
from support.commands import Tell, at_forward, at_saved, hold
from support.disks import free, take_all_but


@scenario("F04")
def full_while_rows_are_written(stage: Stage) -> None:
    if os.geteuid() == 0:
        _full_disk(stage)
    _file_too_large(stage)


def _rows(count: int) -> str:
    return "1 row is" if count == 1 else f"{count} rows are"


def _full_disk(stage: Stage) -> None:
    disk: Path = stage.fixture("small_disk")
    take_all_but(disk, 24_000)
    ended = stage.call(f"{RUN} --out {disk}", _acknowledging)
    assert ended.code == 3, ended
    saved = len(stage.rows(disk / "r1"))
    assert 0 < saved < ROWS
    assert f"cannot write in '{disk / 'r1'}' (no space left on device): {_rows(saved)} saved. Free space" in ended.err
    free(disk)
    resumed = stage.done(f"{stage.typed(ended.err, 'run')} -q")
    assert "unfinished record" not in resumed.err  # the part of a record that did fit was cut off again
    stage.check_final(disk / "r1")


def _file_too_large(stage: Stage) -> None:
    """The same without root: the journal may not grow beyond a limit."""

    def before(tell: Tell) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, resource.RLIM_INFINITY))

    ended = stage.call(RUN, before)
    assert ended.code == 3, ended
    saved = len(stage.rows())
    assert 0 < saved < ROWS
    assert f"{_rows(saved)} saved" in ended.err
    stage.done(f"{stage.typed(ended.err, 'run')} -q")
    stage.check_final()


def _acknowledging(tell: Tell) -> None:
    at_saved(lambda key, score_pass, digest: tell(f"saved {key}"))


@scenario("F05")
def full_while_tables_are_made(stage: Stage) -> None:
    disk: Path = stage.fixture("small_disk")
    run = stage.finished(disk)
    segment = segment_of(run)
    os.truncate(segment, segment.stat().st_size - 10)
    stage.done(f"repair r1 --out {disk}")
    old = {name: (run / name).read_bytes() for name in ("rows.parquet", "texts.parquet", "seal.json")}
    take_all_but(disk, 16_000)  # enough for the missing row, not for the tables
    ended = stage.call(f"run --resume r1 -q --out {disk}")
    assert ended.code == 3, ended
    assert f"cannot write the tables in '{run}' (no space left on device)" in ended.err
    assert f"The journal ({ROWS} rows) is unchanged, and no table is damaged" in ended.err
    assert {name: (run / name).read_bytes() for name in old} == old
    assert len(stage.rows(run)) == ROWS
    free(disk)
    stage.done(stage.typed(ended.err, "repair"))
    stage.check_final(run)


@scenario("F23")
def read_only(stage: Stage) -> None:
    folder: Path = stage.fixture("read_only")
    for out in (folder, folder / "new"):
        ended = stage.call(f"{RUN} --out {out}", NO_WEIGHTS)
        assert (ended.code, ended.out) == (3, "")
        assert "cannot write in" in ended.err
        assert "Nothing was run. Fix: " in ended.err
    assert list(folder.iterdir()) == []


@scenario("F24")
def renamed_in_mid_run(stage: Stage) -> None:
    gate = stage.folder / "gate"
    command = stage.start(RUN, hold(gate, rows=3))
    saved = command.wait_for("holding")
    elsewhere = stage.run_dir.rename(stage.folder / "elsewhere")
    gate.unlink()
    saved += sum(event.startswith("saved") for event in command.events())
    ended = command.end()
    assert (ended.code, ended.out) == (3, ""), ended
    assert (
        f"'{stage.run_dir.relative_to(stage.folder)}' or its journal was moved or deleted during the run" in ended.err
    )
    assert re.search(rf": {_rows(saved)} saved, [1-9]\d* rows? (is|are) not\.", ended.err), ended.err
    assert not stage.run_dir.exists()
    elsewhere.rename(stage.run_dir)
    stage.done(f"{stage.typed(ended.err, 'run')} -q")
    stage.check_final()


@scenario("F32")
def slow(stage: Stage) -> None:
    """One sync takes as long as a slow disk does; the model goes on meanwhile."""
    command = stage.start(RUN, _slow_disk)
    events = list(command.events())
    ended = command.end()
    assert ended.code == 0, ended
    (steps,) = [int(event.split()[1]) for event in events if event.startswith("steps")]
    assert steps > 3, "generation waited for the disk"
    assert "warning: writing to 'results/r1' is slow: a commit took " in ended.err
    stage.check_final()
    shutil.rmtree(stage.run_dir)
    assert "is slow" not in stage.done(RUN).err


def _slow_disk(tell: Tell) -> None:
    """The first sync takes long; tells how many steps the model made before it ended."""
    from kvbench.store import journal

    real, passes, slow = journal._datasync, 0, journal.SLOW_SECONDS + 0.2

    def forward(ids: Any) -> None:
        nonlocal passes
        passes += 1

    def sync(fd: int) -> None:
        nonlocal slow
        before, seconds, slow = passes, slow, 0.0
        time.sleep(seconds)
        if seconds:
            tell(f"steps {passes - before}")
        real(fd)

    at_forward(forward)
    journal._datasync = sync
