"""A plug-in whose code fails in a command: one line with file, line and cause, exit code 2, saved rows kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest

PLUGIN = """
import os
from dataclasses import dataclass
from kvbench.eviction.api import Method, Needs
from kvbench.registry import methods, tasks
from kvbench.tasks.walk import Walk

def fail(where):
    if os.environ["FAILS"] == where:
        raise ValueError("broken " + where)

@methods.register("mine")
@dataclass(frozen=True)
class Mine(Method):
    def needs(self):
        fail("needs")
        return Needs()

    def score(self, view):
        fail("score")
        return view.positions.float()[0 if os.environ["FAILS"] == "shape" else slice(None)]

@tasks.register("own")
class Own(Walk):
    def docs(self, source, **settings):
        fail("docs")
        return super().docs(source, **settings)
"""
CELL = "--budget 32 --interval 8 --task walk/orbit-100 --limit 1 --max-new-tokens 24 -q"
RUN = f"run --plugin mine.py --method full,mine --samples 1 {CELL}"
BENCH = "bench --plugin mine.py --method mine --budget 16 --prompt 24 --new-tokens 16 --sequences 1 --repeats 1"
REPLAY = f"replay --plugin mine.py --method mine {CELL}"
VALUE = "plug-in 'mine.py', line 10, failed: ValueError (broken {})"
SHAPE = "Mine.score() must return a tensor [b, Hk, N] = "
GO_ON = " of 2 rows saved; continue with kvbench run --resume {} --plugin "
OTHERWISE = "mine.py, or correct the file and start a new run (kvbench run --run-name)."
CORRECT = ". Correct the file; --debug shows the traceback."
LINES = {
    "run": (f"{RUN} --run-name one", "score", VALUE, ": 1" + GO_ON.format("one"), OTHERWISE),
    "shape": (f"{RUN} --run-name two", "shape", SHAPE, ": 1" + GO_ON.format("two"), OTHERWISE),
    "workers": (f"{RUN} --run-name three --workers 2", "score", VALUE, GO_ON.format("three"), OTHERWISE),
    "plan": (f"{RUN} --run-name four", "needs", VALUE, CORRECT, CORRECT),
    "task": (f"{RUN.replace('walk', 'own')} --run-name five", "docs", VALUE, CORRECT, CORRECT),
    "bench": (BENCH, "score", VALUE, CORRECT, CORRECT),
    "replay": (REPLAY, "score", VALUE, CORRECT, CORRECT),
    "audit": ("audit mine --plugin mine.py --model tiny -q", "needs", VALUE, CORRECT, CORRECT),
}


@pytest.fixture(scope="module")
def outcomes(calls: Callable, tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("failing")
    (folder / "mine.py").write_text(PLUGIN)
    lines = [(line.split(), {"FAILS": where}) for line, where, *_ in LINES.values()]
    lines += [(f"{LINES['run'][0]} --debug".split(), {"FAILS": "score"}), (LINES["run"][0].split(), {"FAILS": ""})]
    return dict(zip((*LINES, "debug", "again"), calls(folder, lines), strict=True))


@pytest.mark.parametrize("name", LINES)
def test_a_failing_plugin_ends_a_command_with_one_line(outcomes: dict, name: str) -> None:
    _, where, begins, has, ends = LINES[name]
    result = outcomes[name]
    line = result.err.splitlines()[-1]
    assert result.code == 2
    assert line.startswith(f"error: {begins.format(where)}")
    assert has in line
    assert line.endswith(ends)
    assert "Traceback" not in result.err


def test_the_traceback_is_shown_with_debug_and_saved_rows_are_kept(outcomes: dict) -> None:
    assert outcomes["debug"].code == 2
    assert "Traceback" in outcomes["debug"].err
    assert ", line 10, in fail" in outcomes["debug"].err
    assert outcomes["again"].code == 0
