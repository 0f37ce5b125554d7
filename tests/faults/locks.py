"""Who may write to a run, and clocks that jump. F09, F12, F13, F14, F27."""

from __future__ import annotations

import datetime
import errno
import json
import os
import re
import sys
import time
from typing import Any

from faults.stage import NO_WEIGHTS, RUN, Stage, scenario
from support.commands import Before, Tell, hold

from kvbench.store.lock import RunLock

IN_USE = r"run 'r1' is in use by process {} on host \S+ since (\S+ )?\d\d:\d\d\. Wait for it to end"


@scenario("F09")
def two_runners(stage: Stage) -> None:
    _second_is_refused(stage, hold(stage.folder / "gate"))


def _second_is_refused(stage: Stage, before: Before) -> str:
    """While one process runs, another is refused by name; the first ends as if there had been none. What it said."""
    first = stage.start(RUN, before)
    first.wait_for("holding")
    for line in (RUN, "run --resume r1", "run --resume r1 --take-over", "score r1", "repair r1"):
        second = stage.call(line, NO_WEIGHTS)
        assert (second.code, second.out) == (6, ""), (line, second)
        assert re.search(IN_USE.format(first.pid), second.err), second.err
    (stage.folder / "gate").unlink()
    ended = first.end()
    assert ended.code == 0, ended
    stage.check_final()
    return ended.err


@scenario("F12")
def reused_process_id(stage: Stage) -> None:
    """The owner named in the lock has ended; a living process has its id, but started at another time."""
    run = stage.interrupted()
    for changes in ({"pid": os.getppid(), "ticks": 1}, {"pid": _ended_process(stage)}):
        _write_lock(stage, **changes)
        said = stage.done("run --resume r1 -q").err
        assert said == f"warning: taking over run 'r1': process {changes['pid']} on this host has ended.\n"
        assert not (run / "lock").exists()
    stage.check_final()


@scenario("F13")
def lock_of_another_host(stage: Stage) -> None:
    run = stage.interrupted()
    for changes in ({"host": "elsewhere"}, {"boot": "another-boot"}):
        _write_lock(stage, pid=4242, since=time.time() - 3 * 3600 - 60, **changes)
        before = (run / "lock").read_text()
        for line in ("run --resume r1", "score r1", "repair r1"):
            ended = stage.call(line, NO_WEIGHTS)
            assert (ended.code, ended.out) == (6, ""), ended
            assert re.search(r"locked by process 4242 on host \S+ for 3 hours", ended.err)
            assert "--take-over" in ended.err
        assert (run / "lock").read_text() == before
        for command in ("run --resume r1 -q", "score r1 -q", "repair r1"):
            (run / "lock").write_text(before)
            assert "because --take-over was given" in stage.done(f"{command} --take-over").err
            assert not (run / "lock").exists()
    stage.check_final()


def _write_lock(stage: Stage, **changes: Any) -> None:
    """A lock file as a killed process leaves it."""
    path = stage.run_dir / "lock"
    lock = RunLock(path, "r1")
    lock.acquire()
    content = json.loads(path.read_text())
    lock.release()
    path.write_text(json.dumps(content | changes))


def _ended_process(stage: Stage) -> int:
    command = stage.start("--version")
    command.end()
    return command.pid


@scenario("F14")
def jumping_clock(stage: Stage) -> None:
    """The wall clock jumps back a day and on by a year with every second look at it."""

    def before(tell: Tell) -> None:
        _jump()
        hold(stage.folder / "gate", rows=4)(tell)

    _second_is_refused(stage, before)
    rows = stage.rows()
    assert rows["created"].dt.year.nunique() > 1  # the clock did jump
    for column in ("prefill_seconds", "decode_seconds", "evict_seconds", "tokens_per_second"):
        assert (rows[column].dropna() >= 0).all(), column
        assert (rows[column].dropna() < 3600).all() or column == "tokens_per_second"
    (stage.run_dir / "lock").unlink(missing_ok=True)
    stage.done("report r1")
    again = stage.done("run --resume r1 -q", lambda tell: _jump())
    assert again.err == ""


def _jump() -> None:
    """Wall clocks in every module of kvbench: `time.time` and `datetime.now`; clocks that cannot jump stay."""
    clock, looks = time.time, 0

    def jumping() -> float:
        nonlocal looks
        looks += 1
        return clock() + (0, -86_400, 31_536_000)[looks % 3]

    class Jumping(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime.datetime:
            return datetime.datetime.fromtimestamp(jumping(), tz)

    time.time = jumping
    for name, module in list(sys.modules.items()):
        if name.startswith("kvbench") and getattr(module, "datetime", None) is datetime.datetime:
            module.datetime = Jumping  # type: ignore[attr-defined]


@scenario("F27")
def no_flock(stage: Stage) -> None:
    """A network disk that answers ENOLCK, for both processes."""
    import fcntl

    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    real = fcntl.flock
    fcntl.flock = flock  # children are forked with it
    try:
        said = _second_is_refused(stage, hold(stage.folder / "gate"))
    finally:
        fcntl.flock = real
    assert "has no flock; the run is locked by its lock file alone" in said
    assert not (stage.run_dir / "lock").exists()
