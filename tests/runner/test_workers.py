"""Several workers: the coordinator with stubs, then real processes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil
import pytest
import torch
from support.final_tables import differences
from support.runs import configuration, model_folder

from kvbench.cli.app import main
from kvbench.config.run_config import RunConfig
from kvbench.console import faults
from kvbench.console.progress import Progress
from kvbench.engine import memory
from kvbench.engine.plan import USABLE
from kvbench.errors import Interrupted, SetupError, UserError
from kvbench.runner import env, run_plan, session
from kvbench.runner.execute import execute
from kvbench.runner.jobs import Job
from kvbench.runner.run_plan import RunPlan
from kvbench.runner.shard import Shard
from kvbench.runner.work import Work
from kvbench.runner.workers.executor import Lost, Order
from kvbench.runner.workers.local import LocalExecutor
from kvbench.runner.workers.placement import Placement
from kvbench.runner.workers.worker import Worker
from kvbench.store import Journal, RunFolder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("model"))


def workers() -> list[psutil.Process]:
    """The workers that this process has started and that live."""
    return [child for child in psutil.Process().children() if "kvbench.runner.workers" in command(child)]


def command(child: psutil.Process) -> str:
    """The child's command line; empty if the child has ended, also if nobody has asked for its exit code yet."""
    try:
        while not (words := child.cmdline()):  # its exec has closed our pipe, but not yet set up its arguments
            time.sleep(0.001)
        return str(words)
    except psutil.NoSuchProcess:  # a ZombieProcess is one, too
        return ""


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
    """Kills a worker that has written rows with -9 as soon as some rows are saved; another must write the rest."""

    def __init__(self, rows: int, run_dir: Path) -> None:
        super().__init__(quiet=True)
        self.rows, self.run_dir, self.killed = rows, run_dir, 0

    def update(self, rows_done: int, *_: object) -> None:
        if rows_done >= self.rows and not self.killed:
            segment = next((self.run_dir / "journal").iterdir())
            self.killed = int(segment.stem.split("-")[-2])
            os.kill(self.killed, signal.SIGKILL)


def test_two_processes_write_the_rows_of_one_also_when_a_worker_is_killed(model: Path, tmp_path: Path) -> None:
    config = configuration(model)
    alone = execute(config, out=tmp_path, run_name="one")
    said: list[str] = []
    progress = Kills(10, tmp_path / "two")
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
    return replace(Order(config=config, out=str(out), name="r", slots=(), device="cpu"), **changes)


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
    missing: ClassVar[dict[Any, Any]] = {}

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
    ended: list[int] = []
    jobs = [Job(cell, ()) for cell in (0, 0, 1, 1, 0)]
    with Journal(tmp_path) as journal:
        runner = session.Runner(plan, lambda figures: None, lambda text: None)
        runner.run(SimpleNamespace(), journal, jobs, ended.append)  # type: ignore[arg-type]
    assert StubRun.slots == [8, 4, 8, 4]  # the second job of the cell that ended early is left out
    assert len(ended) == len(jobs)


@pytest.mark.parametrize(("asked", "on_cpus", "size"), [(None, 3, 3), (None, 1, None), (1, 3, None), (2, 1, 2)])
def test_workers_on_a_cpu(asked: int | None, on_cpus: int, size: int | None) -> None:
    executor = Placement(workers=asked).executor(None, torch.device("cpu"), on_cpus)  # type: ignore[arg-type]
    assert getattr(executor, "size", None) == size


@pytest.fixture
def five_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    yield
    torch.set_num_threads(before)


def test_a_long_run_of_a_small_model_has_several_workers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, five_threads: None
) -> None:
    plan = RunPlan.make(configuration(model), {}, "r", dry_run=False, say=str)
    assert (plan.threads, plan.allowed) == (1, 5)
    rows = run_plan.ROWS_PER_WORKER
    assert [plan.workers(missing) for missing in (0, rows, 2 * rows, 3 * rows - 1, 9 * rows)] == [1, 1, 2, 2, 4]
    assert replace(plan, allowed=3).workers(9 * rows) == 3
    assert Shard(2, 1).divide(plan).workers(9 * rows) == 1
    cell, half = plan.cells[0], int(memory.total(plan.device) * USABLE["cpu"])
    for peak, workers in ((half // 2 - run_plan.PROCESS, 2), (half, 1)):
        large = replace(cell, plan=replace(cell.plan, peak_bytes=peak))
        assert replace(plan, cells=(cell, large)).workers(9 * rows) == workers

    given: list[int] = []

    def executor(self: Placement, order: Order, device: torch.device, on_cpus: int) -> None:
        given.append(on_cpus)
        raise SetupError("enough")

    monkeypatch.setattr(Placement, "executor", executor)
    monkeypatch.setattr(run_plan, "ROWS_PER_WORKER", 30)
    for before in (0, 30):  # of 72 rows
        with pytest.raises(SetupError):
            Work(None, plan, before, Progress(quiet=True), str).do(Placement(), None, ())  # type: ignore[arg-type]
    assert given == [2, 1]


def test_a_long_run_on_a_cpu_needs_no_option_for_its_workers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, five_threads: None
) -> None:
    monkeypatch.setattr(run_plan, "ROWS_PER_WORKER", 30)
    result = execute(configuration(model), out=tmp_path, run_name="two", placement=Placement())
    assert (result.done, result.planned) == (72, 72)
    assert len(list((tmp_path / "two" / "journal").iterdir())) == 2


def test_a_worker_takes_the_slots_of_the_coordinator(model: Path, tmp_path: Path) -> None:
    config = configuration(model)
    said = execute(config, out=tmp_path, run_name="one")
    environment = json.loads((tmp_path / "one" / "run.json").read_text())["environment"]
    with RunFolder.open(tmp_path, "r", config.stored(), environment=environment, planned=said.planned):
        pass
    plans = [replace(cell.plan, slots=2) for cell in said.plans]
    keys = tuple(row.key for row in said.plans[0].rows[:4])
    Worker(order(config, tmp_path, slots=tuple(plans))).run([Job(0, keys)], show=str, say=str, ended=str)
    with RunFolder.resume(tmp_path, "r", environment=env.compared()) as folder:
        entries = folder.content().entries
    assert [entries[key].row["slots"] for key in keys] == [2] * 4
    small = replace(plans[0], peak_bytes=memory.total(torch.device("cpu")) + 1)
    with pytest.raises(SetupError, match=r"a worker's device has .* GiB, but .* is planned with"):
        Worker(order(config, tmp_path, slots=(small, *plans[1:])))
