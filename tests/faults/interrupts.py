"""Signals and readers that go away. F15, F16, F29."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time

from faults.stage import ROWS, RUN, Stage, scenario
from support.commands import hold

from kvbench.store import read_run


@scenario("F15")
def once(stage: Stage) -> None:
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        gate = stage.folder / "gate"
        command = stage.start(RUN, hold(gate, rows=2))
        saved = command.wait_for("holding")
        command.send(number)
        gate.unlink()
        saved += sum(event.startswith("saved") for event in command.events())
        ended = command.end()
        assert (ended.code, ended.out) == (code, ""), ended
        said = rf"(.*\n)*interrupted: {saved} of {ROWS} rows saved; continue with kvbench run --resume r1\n"
        assert re.fullmatch(said, ended.err), ended.err
        assert 0 < saved < ROWS
        assert not (stage.run_dir / "lock").exists()
        assert read_run(stage.run_dir).saved == saved
        report = stage.call("report r1 --require-complete")
        assert report.code == 4
        assert f"{saved} of {ROWS} rows)" in report.out
        assert "warning: run 'r1' is not finished:" in report.err
        stage.done(f"{stage.typed(ended.err, 'run')} -q")
        stage.check_final()
        stage.done("report r1 --require-complete")
        shutil.rmtree(stage.run_dir)


@scenario("F16")
def twice(stage: Stage) -> None:
    """The batch does not end by itself: it stands still for as long as the gate is there."""
    gate = stage.folder / "gate"
    command = stage.start(RUN, hold(gate, rows=3))
    saved = command.wait_for("holding")
    while command.running():  # the second counts only when the first was noticed
        command.send(signal.SIGINT)
        time.sleep(0.2)
    saved += sum(event.startswith("saved") for event in command.events())
    ended = command.end()
    assert ended.code in (130, -signal.SIGINT), ended
    assert "Traceback" not in ended.err
    assert gate.exists()
    assert read_run(stage.run_dir).saved >= saved >= 3
    stage.done("run --resume r1 -q")
    stage.check_final()


@scenario("F29")
def closed_pipe(stage: Stage) -> None:
    stage.finished(stage.folder / "other")
    for line in (RUN.replace(" -q", ""), "report r1", f"{RUN} --json", "show r1", "list methods"):
        reader, writer = os.pipe()
        os.close(reader)
        try:
            ended = stage.call(line, stdout=writer)
        finally:
            os.close(writer)
        assert ended.code == 0, (line, ended)
        assert "error" not in ended.err
    stage.check_final()
