"""SIGINT, SIGTERM and SIGHUP in every phase of every command: one line, the exit code, no lock, no child (F15, F16)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.folders import ROOT
from support.runs import model_folder
from support.zygote import PATIENCE, Case, Zygote

from kvbench.store import read_rows, read_run

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
GRID = "run --method full,gkv --budget 32 --task walk/orbit-100 --limit 6 --interval 8 --max-new-tokens 24 --slots 2 -q"
ROWS = 12
CONTINUE = r"interrupted: (\d+) of 12 rows saved; continue with kvbench run --resume {name}\n"
AGAIN = "interrupted before it finished; the same command starts anew.\n"
SLOW_TASK = '''
import os, time
from kvbench.registry import tasks
from kvbench.task import Doc, GenSpec, Task, Turn


@tasks.register("slow")
class Slow(Task):
    """Scores take for ever."""

    def docs(self, source, *, style="default", limit=None):
        return [Doc(doc_id="a", turns=(Turn(question="1 + 1 = ?"),), reference="2")]

    def gen(self, model_type):
        return GenSpec(n=1, max_new_tokens=4)

    def score(self, doc, output):
        open("scoring", "w").write(str(os.getpid()))
        time.sleep(600)

    def patience(self, doc):
        return 500.0
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("signals")
    (path / "slow.py").write_text(SLOW_TASK)
    return path


@pytest.fixture(scope="module")
def zygote(folder: Path) -> Iterator[Zygote]:
    with Zygote(folder) as made:
        yield made


@pytest.fixture(scope="module")
def finished(zygote: Zygote, folder: Path) -> Path:
    code, err = zygote.start(f"{GRID} --run-name done").end()
    assert code == 0, err
    return folder / "results" / "done"


def ended(case: Case, number: int) -> str:
    """The line with which a command ended after a signal."""
    code, err = case.end()
    assert code == 128 + number, err
    assert not list(case.zygote.folder.glob("results/*/lock"))
    lines = [line for line in err.splitlines(keepends=True) if not line.startswith(("note: ", "warning: "))]
    assert len(lines) == 1, err
    return lines[0]


def is_gone(pid: int) -> bool:
    """Whether a process has ended. Orphans are reaped by whoever adopts them, so zombies count as ended."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
        except OSError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.05)
    return False


RUNNING = {  # where a run is stopped -> a function, the call of it, the signal
    "loading": ("kvbench.runner.run_plan:load", 1, HUP),
    "checking weights": ("kvbench.runner.work:check_weights", 1, INT),
    "prefill": ("kvbench.engine.prefill:PromptReader.read", 3, TERM),
    "decode": ("kvbench.engine.steps:DecodeSteps._step", 60, INT),
    "decode, SIGTERM": ("kvbench.engine.steps:DecodeSteps._step", 60, TERM),
    "decode, SIGHUP": ("kvbench.engine.steps:DecodeSteps._step", 60, HUP),
    "sealing rows": ("kvbench.store.tables:write_rows", 1, INT),
    "sealing texts": ("kvbench.store.tables:_write_texts", 1, TERM),
    "tables in place": ("kvbench.store.tables:sync_folder", 1, HUP),
}


@pytest.mark.parametrize("phase", RUNNING)
def test_a_run_ends_with_its_rows_saved_and_goes_on(zygote: Zygote, folder: Path, finished: Path, phase: str) -> None:
    block, calls, number = RUNNING[phase]
    name = f"r-{re.sub('[^a-z]+', '-', phase.lower())}"
    case = zygote.start(f"{GRID} --run-name {name}", block=block, calls=calls)
    case.wait_for_block()
    case.signal(number)
    told = re.fullmatch(CONTINUE.format(name=name), ended(case, number))
    assert told
    saved = int(told[1])
    run = folder / "results" / name
    assert read_run(run).saved == saved
    assert saved == ROWS if "seal" in phase or "tables" in phase else saved < ROWS
    assert not [path.name for path in run.iterdir() if path.name.endswith(".tmp")]
    if phase in ("decode", "tables in place"):
        code, err = zygote.start(f"run --resume {name} -q").end()
        assert code == 0, err
        same = ["doc_id", "method", "sample", "output_sha256"]
        assert read_rows(run)[same].equals(read_rows(finished)[same])


def test_scores_under_way_are_left_and_their_processes_end(zygote: Zygote, folder: Path) -> None:
    case = zygote.start("run --method full --task slow --plugin slow.py --run-name scoring -q")
    deadline = time.monotonic() + PATIENCE
    while not ((marker := folder / "scoring").exists() and marker.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    case.signal(TERM)
    assert ended(case, TERM).startswith("interrupted: 1 of 1 row saved; continue with kvbench run --resume scoring")
    assert is_gone(int(marker.read_text()))
    rows = read_rows(folder / "results" / "scoring")
    assert (rows.status.tolist(), rows.note.tolist()) == (["unscored"], ["interrupted before it was scored"])


OTHERS = {  # a command -> a function in it, what the line says, the signal
    "score done --all -q": (
        "kvbench.runner.rescore:_Scoring._write",
        "interrupted: scores made so far are saved; the same command scores all answers again.",
        HUP,
    ),
    "score done  --all -q": ("kvbench.store.tables:write_rows", "interrupted: scores made so far are saved", TERM),
    "report done": ("kvbench.report.load:load", AGAIN, TERM),
    "report done --out R": ("kvbench.report.render:write", AGAIN, INT),
    "repair done": ("kvbench.store.tables:_write_texts", AGAIN, HUP),
    "replay --method gkv --budget 32 --task walk/orbit-100": (
        "kvbench.replay.session:answer_with_full_cache",
        AGAIN,
        HUP,
    ),
    "replay --method gkv --budget 32 --task walk/orbit-100 --out R": (
        "kvbench.replay.session:compare",
        "interrupted: finished parts are kept in 'R'; the same command continues from there.",
        TERM,
    ),
    "replay --method gkv --budget 32 --task walk/orbit-100 --out Q": (
        "kvbench.replay.session:answer_with_full_cache",
        AGAIN,
        TERM,
    ),
    "train lookaheadkv --out T": ("kvbench.train.prepare:prepare", "interrupted: answers and the last checkpoint", INT),
    "bench --sequences 1 --new-tokens 50": ("kvbench.runner.bench.systems:EngineSystem.run", AGAIN, TERM),
    "audit gkv": ("kvbench.audit.invariants.checks:audit", AGAIN, INT),
    "data fetch gsm8k --out D": (
        "kvbench.cli.commands.data:fetch_data",
        "interrupted: 0 of 1 tasks fetched; the same",
        HUP,
    ),
    "list methods": ("kvbench.registry:Registry.items", AGAIN, INT),
    "run --resume done -q": ("kvbench.report.load:load", "interrupted: all rows are saved; 'kvbench report", TERM),
}


@pytest.mark.parametrize("line", OTHERS)
def test_every_command_ends_with_one_line(zygote: Zygote, finished: Path, line: str) -> None:
    block, said, number = OTHERS[line]
    tables = {name: (finished / name).read_bytes() for name in ("rows.parquet", "texts.parquet", "seal.json")}
    case = zygote.start(line, block=block)
    blocked = case.wait_for_block()
    case.signal(number)
    assert ended(case, number).startswith(said)
    assert is_gone(blocked)  # of bench, a child of the command
    if not line.startswith("run"):  # which makes the tables anew before it reports
        assert {name: (finished / name).read_bytes() for name in tables} == tables
    assert len(read_rows(finished)) == ROWS


@pytest.mark.parametrize(("calls", "number"), [(1, TERM), (60, INT)])
def test_what_does_not_return_to_python_is_ended_too(zygote: Zygote, folder: Path, calls: int, number: int) -> None:
    """A matrix product of a minute: the handler cannot run, the watching thread can."""
    name = f"busy{calls}"
    case = zygote.start(
        f"{GRID} --run-name {name}", block="kvbench.engine.steps:DecodeSteps._step", calls=calls, how="c", patience=1.0
    )
    case.wait_for_block()
    case.signal(number)
    told = re.fullmatch(CONTINUE.format(name=name), ended(case, number))
    assert told
    assert read_run(folder / "results" / name).saved >= int(told[1])


def test_a_second_signal_ends_at_once(zygote: Zygote, folder: Path) -> None:
    """Patience is an hour here, so nothing but the second signal can end the command."""
    case = zygote.start(
        f"{GRID} --run-name twice", block="kvbench.engine.steps:DecodeSteps._step", calls=60, how="c", patience=3600.0
    )
    case.wait_for_block()
    case.signal(INT)
    time.sleep(1.0)  # two within a third of a second are one request, as timeout(1) sends it
    case.signal(INT)
    told = re.fullmatch(CONTINUE.format(name="twice"), ended(case, INT))
    assert told
    assert read_run(folder / "results" / "twice").saved >= int(told[1])


def test_one_request_that_comes_twice_is_one(zygote: Zygote) -> None:
    case = zygote.start(f"{GRID} --run-name both", block="kvbench.engine.steps:DecodeSteps._step", calls=60)
    case.wait_for_block()
    case.signal(TERM)
    case.signal(TERM)
    assert re.fullmatch(CONTINUE.format(name="both"), ended(case, TERM))


def test_nohup_keeps_its_meaning(zygote: Zygote) -> None:
    case = zygote.start(
        f"{GRID} --run-name nohup", block="kvbench.engine.steps:DecodeSteps._step", calls=60, ignore=[int(HUP)]
    )
    case.wait_for_block()
    case.signal(HUP)
    time.sleep(0.5)
    case.signal(TERM)
    assert re.fullmatch(CONTINUE.format(name="nohup"), ended(case, TERM))


def test_a_long_prompt_is_left_in_its_middle(zygote: Zygote, folder: Path) -> None:
    """Before, the signal was heard only when the whole prompt had been read."""
    model_folder(folder / "model")
    (folder / "long.jsonl").write_text(json.dumps({"id": "long", "question": "x " * 12_000, "answer": "1"}))
    line = "run --model model --method full,gkv --budget 64 --task-file long.jsonl --task file/long --max-new-tokens 4"
    case = zygote.start(f"{line} --run-name long -q", block="kvbench.engine.prefill:PromptReader.read", how="after")
    case.wait_for("began")
    case.signal(TERM)
    assert ended(case, TERM).startswith("interrupted: 0 of 2 rows saved; continue with")
    assert not (case.folder / "ended").exists()


STARTING = """
import importlib.abc, pathlib, runpy, sys, time
class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            pathlib.Path("here").write_text("x")
            time.sleep(600)
sys.meta_path.insert(0, Slow())
runpy.run_module("kvbench", run_name="__main__")
"""


@pytest.mark.parametrize("number", [INT, TERM, HUP])
def test_start_up_is_covered(tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", STARTING, "kvbench.cli.app"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + PATIENCE
    while not (tmp_path / "here").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    _, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (128 + number, AGAIN)


def test_the_installed_command_begins_with_the_signals() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["scripts"]["kvbench"] == "kvbench.__main__:main"


def test_a_forked_child_ends_as_any_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child shares its parent's pipe: a signal to the child must not end the parent, however early it comes."""
    from kvbench.console import signals

    reset = signals._Handling.after_fork

    def late(handling: signals._Handling) -> None:
        time.sleep(0.3)
        reset(handling)

    monkeypatch.setattr(signals._Handling, "after_fork", late)
    parent = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with signals.handled():
        try:
            pid = os.fork()
            if pid == 0:
                time.sleep(60)
        finally:
            if os.getpid() != parent:
                os._exit(0)
        os.kill(pid, TERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -TERM
        time.sleep(0.2)
        assert signals._handling is not None
        assert signals._handling.number is None
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask


def test_an_exception_in_a_destructor_is_not_lost() -> None:
    from kvbench.console import signals

    class Last:
        def __del__(self) -> None:
            os.kill(os.getpid(), TERM)
            for _ in range(1000):
                time.sleep(0.001)

    def work() -> None:
        with signals.handled():
            last = Last()
            del last
            time.sleep(5)

    with pytest.raises(signals.Signalled):
        work()


def test_a_shield_postpones_and_a_phase_tells() -> None:
    from kvbench.console import signals
    from kvbench.errors import Interrupted

    done: list[str] = []

    def work() -> None:
        with signals.handled(), signals.phase(lambda: f"{done[0]} written"):
            with signals.shield():
                os.kill(os.getpid(), HUP)
                time.sleep(0.05)
                done.append("one")
            done.append("never")

    with pytest.raises(Interrupted, match=r"^one written$") as caught:
        work()
    assert (caught.value.exit_code, done) == (129, ["one"])
    assert signal.getsignal(HUP) is signal.SIG_DFL
