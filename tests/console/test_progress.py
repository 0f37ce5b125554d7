"""Progress: on stderr only, silent when asked, and right about speed and time left."""

from __future__ import annotations

import io

import pytest

from kvbench.console.progress import Progress, size, step
from kvbench.replay.work import Readings


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_plain_line_every_ten_seconds_where_there_is_no_terminal(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.delenv("KVBENCH_NO_PROGRESS", raising=False)
    stream = io.StringIO()
    progress = Progress(stream=stream, clock=clock)
    progress.begin(total=100, done=20)
    progress.cell("walk gkv @48")
    for second in range(1, 31):
        clock.now = float(second)
        progress.update(20 + second, 1000 * second, 2048, 4096, 0.5, 0.1)
    progress.end()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert (
        lines[0] == "30/100 rows  walk gkv @48  1,000 tok/s  KV 2 KiB now, 4 KiB peak  score 0.500 +- 0.100  1:10 left"
    )
    assert capsys.readouterr().out == ""


def test_preparations_are_told_before_there_are_rows(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVBENCH_NO_PROGRESS", raising=False)
    stream = io.StringIO()
    progress = Progress(stream=stream, clock=clock)
    clock.now = 1.0
    progress.prepare("loading torch")
    clock.now = 12.0
    progress.prepare("loading the model")
    progress.begin(4, 0)
    clock.now = 30.0
    progress.cell("walk")
    assert stream.getvalue().splitlines() == ["loading the model", "0/4 rows  walk"]


def test_a_replay_of_many_short_parts_is_not_silent(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVBENCH_NO_PROGRESS", raising=False)
    stream = io.StringIO()
    progress = Readings(stream=stream, clock=clock)
    progress.prepare("loading the model")
    for _ in range(3):  # four seconds each
        progress.task("walk", 2, "readings")
        for method in ("golden 32", "gkv 32"):
            clock.now += 2.0
            progress.next(method, 1, 200)
        progress.end()
    assert stream.getvalue().splitlines() == ["1/2 readings  walk  golden 32  100 tok/s  0:02 left"]


@pytest.mark.parametrize("way", ["quiet", "variable"])
def test_silence(clock: Clock, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setenv("KVBENCH_NO_PROGRESS", "1" if way == "variable" else "")
    stream = io.StringIO()
    progress = Progress(stream=stream, clock=clock, quiet=way == "quiet")
    progress.prepare("loading the model")
    progress.begin(10, 0)
    clock.now = 60.0
    progress.update(1, 1, 1, 1)
    progress.end()
    assert stream.getvalue() == ""


def test_a_terminal_gets_a_block_that_goes_away(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("KVBENCH_NO_PROGRESS", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    progress = Progress(stream=stream, clock=clock)
    progress.prepare("loading the model")
    assert stream.getvalue() == "loading the model\n"  # no display that bars of a download would break
    progress.begin(10, 0)
    progress.cell("walk \x1b[2Jgkv")
    progress.end()
    assert "\x1b[2J" not in stream.getvalue()
    assert stream.getvalue().endswith(("\r", "\x1b[2K", "\x1b[?25h", "\x1b[1A\x1b[2K"))


def test_sizes() -> None:
    assert [size(n) for n in (0, 512, 1536, 3 * 2**30, 2**41)] == ["0 B", "512 B", "1.5 KiB", "3 GiB", "2 TiB"]
    assert [size(n * 2**20) for n in (1.5, 999.4, 999.5, 1023)] == ["1.5 MiB", "999 MiB", "1000 MiB", "1023 MiB"]


def test_a_step_is_one_line_unless_silenced(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.delenv("KVBENCH_NO_PROGRESS", raising=False)
    step("8 sequences\x1b, round 2 of 5")
    monkeypatch.setenv("KVBENCH_NO_PROGRESS", "1")
    step("3 of 5")
    assert capsys.readouterr().err == "8 sequences\\x1b, round 2 of 5\n"
