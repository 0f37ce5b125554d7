"""Several workers: the coordinator with stubs, then real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil
import pytest
import torch
from support.final_tables import differences
from support.runs import configuration, model_folder
from support.stub_workers import row_of, simulate

from kvbench.cli.app import main
from kvbench.config.run_config import RunConfig
from kvbench.console import faults
from kvbench.console.progress import Progress
from kvbench.errors import Interrupted, KVBenchError, SetupError, UserError
from kvbench.runner import env, session
from kvbench.runner.execute import execute
from kvbench.runner.jobs import Job
from kvbench.runner.workers.coordinator import TRIES, Coordinator
from kvbench.runner.workers.executor import Done, Event, Failed, Lost, Noticed, Order, Ready
from kvbench.runner.workers.local import LocalExecutor
from kvbench.runner.workers.placement import Placement
from kvbench.runner.workers.worker import Worker
from kvbench.store import Journal, RunFolder
from kvbench.store.tail import JournalTail


@pytest.mark.parametrize("ahead", [1, 3, None])
def test_no_row_is_lost_or_doubled_when_workers_die(tmp_path: Path, ahead: int | None) -> None:
    found = simulate(tmp_path / "run", workers=8, rows=300, job=10, deaths=40, ahead=ahead)
    assert found["deaths"] > 1
    assert found["jobs again"] > 1
    assert (found["lost"], found["doubled"]) == (0, 0)


class Scripted:
    """An executor whose workers say what a script says, an event per call."""

    name: str = "scripted"
    ahead: int | None = 1

    def __init__(self, size: int, *events: Event) -> None:
        self.size = size
        self.script = list(events)
        self.started: list[str] = []
        self.sent: list[tuple[str, list[Job]]] = []
        self.stopped = False

    def start(self, worker: str) -> None:
        self.started.append(worker)

    def send(self, worker: str, jobs: Sequence[Job]) -> None:
        self.sent.append((worker, list(jobs)))

    def events(self, seconds: float) -> Iterator[Event]:
        yield self.script.pop(0)

    def stop(self, seconds: float) -> None:
        self.stopped = True


JOBS = [Job(0, ("aa", "ab")), Job(1, ("ba",))]


def run(folder: Path, executor: Scripted, jobs: Sequence[Job] = JOBS) -> list[str]:
    said: list[str] = []
    labels = ["walk gkv @48", "walk h2o @48"]
    try:
        Coordinator(executor, folder, progress=Progress(quiet=True), say=said.append, labels=labels).run(jobs)
    finally:
        assert executor.stopped
    return said


def test_a_lost_worker_s_job_goes_to_the_next_without_its_saved_rows(tmp_path: Path) -> None:
    class Saves(Scripted):
        def events(self, seconds: float) -> Iterator[Event]:
            if isinstance(self.script[0], Lost):
                with Journal(tmp_path) as journal:
                    journal.append(row_of("aa"))
            yield from super().events(seconds)

    script = (Ready("1"), Lost("1", "killed\x1b by SIGKILL"), Ready("2"), Done("2"), Done("2"))
    executor = Saves(2, *script)
    said = run(tmp_path, executor)
    assert executor.sent == [("1", [JOBS[0]]), ("2", [Job(0, ("ab",))]), ("2", [JOBS[1]])]
    assert executor.started == ["1", "2", "1"]
    assert said == ["worker 1 was lost (killed\\x1b by SIGKILL); 1 rows run again."]


def test_rows_that_lose_every_worker_end_the_run(tmp_path: Path) -> None:
    executor = Scripted(1, *[Ready("1"), Lost("1", "killed by SIGSEGV")] * TRIES)
    with pytest.raises(SetupError, match=r"3 workers were lost at the same rows of walk gkv @48 .*SIGSEGV"):
        run(tmp_path, executor)


def test_workers_that_do_not_start_end_the_run(tmp_path: Path) -> None:
    executor = Scripted(2, *[Lost(worker, "no GPU") for worker in "12" for _ in range(TRIES)])
    with pytest.raises(SetupError, match=r"no worker starts \(the last: no GPU\)"):
        run(tmp_path, executor)


def test_a_worker_that_may_still_start_is_waited_for(tmp_path: Path) -> None:
    events = (
        [Lost("1", "no GPU")] * 2 + [Lost("2", "no GPU")] * 2 + [Lost("1", "no GPU"), Ready("2"), Done("2"), Done("2")]
    )
    executor = Scripted(2, *events)
    run(tmp_path, executor)
    assert executor.started == ["1", "2", "1", "1", "2", "2"]


def test_workers_that_are_lost_before_any_row_end_the_run(tmp_path: Path) -> None:
    """Also where each loss has another job as its first one."""
    jobs = [Job(0, (f"{number:02x}",)) for number in range(40)]
    script = [event for _ in range(2 * TRIES + 1) for event in (Ready("1"), Lost("1", "no licence"))]
    executor = Scripted(2, *script)
    executor.ahead = None
    with pytest.raises(SetupError, match=r"lost (at the same rows|one after the other).*no licence"):
        run(tmp_path, executor, jobs)
    assert len(executor.sent) <= 2 * TRIES + 1


def test_one_worker_that_does_not_start_is_done_without(tmp_path: Path) -> None:
    events = (*[Lost("1", "no GPU")] * TRIES, Ready("2"), Done("2"), Done("2"))
    executor = Scripted(2, *events)
    run(tmp_path, executor)
    assert executor.started.count("1") == TRIES
    assert [worker for worker, _ in executor.sent] == ["2", "2"]


def test_an_error_that_all_would_meet_ends_the_run_with_its_code(tmp_path: Path) -> None:
    with pytest.raises(KVBenchError, match="the judge refuses the key") as raised:
        run(tmp_path, Scripted(2, Ready("1"), Failed("1", "the judge refuses the key", 3)))
    assert raised.value.exit_code == 3


def test_warnings_of_workers_are_passed_on(tmp_path: Path) -> None:
    said = run(tmp_path, Scripted(1, Ready("1"), Noticed("1", "out of memory"), Done("1"), Done("1")))
    assert said == ["out of memory"]


def test_a_tail_reads_whole_records_that_are_new(tmp_path: Path) -> None:
    def write(*keys: str) -> Path:
        with Journal(tmp_path) as journal:
            for key in keys:
                journal.append(row_of(key), output="a\rb\nc")
            assert journal.segment is not None
            return journal.segment

    write("aa")
    tail = JournalTail(tmp_path)
    segment = write("ab", "ac")
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-5])
    tail.read()
    assert tail.statuses == {"ab": "ok"}
    segment.write_bytes(whole)
    write("ad")
    tail.read()
    assert tail.statuses == dict.fromkeys(("ab", "ac", "ad"), "ok")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


def workers() -> list[psutil.Process]:
    """The workers that this process has started and that live."""
    return [child for child in psutil.Process().children() if "kvbench.runner.workers" in str(child.cmdline())]


class Signals(Progress):
    """Sends this process SIGTERM as soon as some rows are saved."""

    def __init__(self, rows: int) -> None:
        super().__init__(quiet=True)
        self.rows, self.sent = rows, False

    def update(self, rows_done: int, *_: object) -> None:
        if rows_done >= self.rows and not self.sent:
            self.sent = True
            os.kill(os.getpid(), signal.SIGTERM)


class Kills(Progress):
    """Kills a worker with -9 as soon as some rows are saved."""

    def __init__(self, rows: int) -> None:
        super().__init__(quiet=True)
        self.rows, self.killed = rows, 0

    def update(self, rows_done: int, *_: object) -> None:
        if rows_done >= self.rows and not self.killed:
            self.killed = workers()[0].pid
            os.kill(self.killed, signal.SIGKILL)


def test_two_processes_write_the_rows_of_one_also_when_a_worker_is_killed(model: Path, tmp_path: Path) -> None:
    config = configuration(model)
    alone = execute(config, out=tmp_path, run_name="one")
    said: list[str] = []
    progress = Kills(10)
    placement = Placement(workers=2)
    result = execute(config, out=tmp_path, run_name="two", placement=placement, progress=progress, notice=said.append)
    assert progress.killed
    assert any("killed by SIGKILL" in text for text in said)
    assert (result.done, result.planned, result.failed) == (alone.done, alone.planned, alone.failed)
    assert result.run_dir is not None
    assert alone.run_dir is not None
    assert differences(alone.run_dir, result.run_dir) == []
    assert len(list((result.run_dir / "journal").iterdir())) >= 2


def test_a_signal_stops_all_workers_and_one_process_goes_on(model: Path, tmp_path: Path) -> None:
    config = configuration(model)
    alone = execute(config, out=tmp_path, run_name="one")
    with pytest.raises(Interrupted, match=r"interrupted: \d+ of 72 rows saved; continue with") as stopped:
        execute(config, out=tmp_path, run_name="two", placement=Placement(workers=2), progress=Signals(10))
    assert stopped.value.exit_code == 143
    assert not workers()
    with RunFolder.resume(tmp_path, "two", environment=env.compared()) as folder:
        saved = len(folder.done_keys())
    assert f" {saved} of 72 " in str(stopped.value)
    result = execute(config, out=tmp_path, run_name="two", resume=True)
    assert result.run_dir is not None
    assert alone.run_dir is not None
    assert differences(alone.run_dir, result.run_dir) == []


def order(config: RunConfig, out: Path, **changes: Any) -> Order:
    cells = len(config.cells())
    return replace(Order(config=config, out=str(out), name="r", slots=(4,) * cells, device="cpu"), **changes)


def test_a_worker_of_another_version_is_refused(model: Path, tmp_path: Path) -> None:
    config = configuration(model)
    with RunFolder.open(tmp_path, "r", config.stored(), environment=env.compared() | {"kvbench_version": "0.0.1"}):
        pass
    with pytest.raises(UserError, match=r"made with kvbench 0\.0\.1; installed: 0\.1\.0"):
        Worker(order(config, tmp_path))


def test_a_worker_that_does_not_see_the_folder_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"does not see the folder .* Give --out a folder that all machines share"):
        Worker(order(configuration(model), tmp_path / "elsewhere"))


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--workers 0", "--workers must be a whole number from 1 to 4096; got 0."),
        ("--executor dask", "--executor 'dask': choose local"),
    ],
)
def test_wrong_options(typed: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--task", "walk", "--method", "full", *typed.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_worker_without_its_gpu_is_a_failure_of_the_machine(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="sees no GPU") as raised:
        Worker(order(configuration(model), tmp_path, device="cuda"))
    assert faults.of_machine(raised.value)


def test_a_worker_that_says_it_is_lost_is_started_once_more(model: Path, tmp_path: Path) -> None:
    """The worker fails while it starts; the next process of its name must not be taken for the lost one."""
    executor = LocalExecutor(order(configuration(model), tmp_path, device="cuda"), [None])
    executor.start("1")
    first = executor._processes["1"]
    lost = []
    try:
        while len(lost) < 2:
            for event in executor.events(60.0):
                assert event == Lost("1", "CUDA error: this worker sees no GPU")
                lost.append(event)
                executor.start("1")
        assert first.returncode is not None
        assert len(workers()) == 1
    finally:
        executor.stop(1.0)
    assert not workers()


class StubRun:
    """In place of `CellRun`: memory runs out once in the first job of cell 0, and cell 1 ends early."""

    slots: ClassVar[list[int]] = []

    def __init__(self, *, cell_plan: Any, **_: Any) -> None:
        self.slots.append(cell_plan.plan.slots)
        self.ended_early = cell_plan.cell.label == "nan"
        lacks = cell_plan.cell.label == "oom" and not cell_plan.oom_retries
        self.cell_plan = cell_plan.after_lack_of_memory(cell_plan.plan.slots // 2, 1) if lacks else cell_plan

    def run(self) -> None: ...


@dataclass(frozen=True)
class StubPlan:
    """In place of `CellPlan`."""

    cell: Any
    plan: Any
    oom_retries: int = 0
    rows: tuple[Any, ...] = ()

    def after_lack_of_memory(self, slots: int, retries: int) -> StubPlan:
        return replace(self, plan=SimpleNamespace(slots=slots), oom_retries=retries)


def test_later_jobs_of_a_cell_begin_as_the_last_one_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "CellRun", StubRun)
    cells = [StubPlan(SimpleNamespace(label=label, task="walk"), SimpleNamespace(slots=8)) for label in ("oom", "nan")]
    inputs, config = SimpleNamespace(works={"walk": None}), SimpleNamespace(keep_prompts=False)
    machine = {"device": torch.device("cpu"), "dtype": torch.float32, "shape": SimpleNamespace(parts=())}
    plan: Any = SimpleNamespace(cells=cells, inputs=inputs, config=config, **machine)
    ended: list[None] = []
    jobs = [Job(cell, ()) for cell in (0, 0, 1, 1, 0)]
    with Journal(tmp_path) as journal:
        runner = session.Runner(plan, lambda figures: None, lambda text: None)
        runner.run(SimpleNamespace(), journal, jobs, lambda: ended.append(None))  # type: ignore[arg-type]
    assert StubRun.slots == [8, 4, 8, 4]  # the second job of the cell that ended early is left out
    assert len(ended) == len(jobs)
