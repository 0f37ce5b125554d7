"""Workers in actors of Ray: rows, losses, and what the user reads when Ray cannot be used."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.final_tables import differences
from support.rays import cluster
from support.runs import configuration, model_folder
from support.signals_to_workers import SignalsParents

from kvbench.config.run_config import Grid, MethodChoice, RunConfig
from kvbench.console.signals import Signalled
from kvbench.errors import KVBenchError, SetupError, UserError
from kvbench.runner.execute import execute
from kvbench.runner.workers import ray_cluster
from kvbench.runner.workers.executor import Order
from kvbench.runner.workers.placement import Placement
from kvbench.runner.workers.ray_cluster import RayExecutor, _why

GRID = Grid(methods=(MethodChoice(name="gkv"),), budgets=(32,), tasks=("walk/orbit-100",))


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with cluster() as address:
        yield address


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return replace(configuration(model_folder(tmp_path_factory.mktemp("model"))), grids=(GRID,), slots=1)


@pytest.fixture(scope="module")
def alone(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same run by this process."""
    result = execute(config, out=tmp_path_factory.mktemp("alone"), run_name="alone")
    assert result.run_dir is not None
    return result.run_dir


@pytest.mark.slow
def test_two_actors_write_the_rows_of_one_process_also_when_an_actor_is_killed(
    address: str, config: RunConfig, alone: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    progress, said = SignalsParents(tmp_path / "two" / "journal", signal.SIGKILL), list[str]()
    placement = Placement(name="ray", workers=2, address=address)
    result = execute(config, out=tmp_path, run_name="two", placement=placement, progress=progress, notice=said.append)
    assert progress.left == []
    assert any("worker process has died" in text for text in said), said
    assert (result.done, result.planned) == (24, 24)
    assert differences(alone, tmp_path / "two") == []
    assert signal.getsignal(signal.SIGTERM) == handler
    assert "raylet" not in "".join(capfd.readouterr())  # Ray's own words


@pytest.mark.slow
def test_an_error_of_kvbench_in_an_actor_ends_the_run_with_its_line(
    address: str, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbench.runner.execute.Order", lambda **order: order_of_another_folder(tmp_path, **order))
    with pytest.raises(KVBenchError, match=r"does not see the folder .* Give --out a folder that all machines share"):
        execute(config, out=tmp_path, placement=Placement(name="ray", workers=1, address=address))


def order_of_another_folder(folder: Path, **order: object) -> Order:
    return Order(**order | {"out": str(folder / "elsewhere")})  # type: ignore[arg-type]


def test_the_number_of_workers_comes_from_the_cluster(
    address: str, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = Order(config=config, out="results", name="r", slots=(), device="cpu")
    with pytest.raises(SetupError, match=r"the Ray cluster has no GPU now\. Give --workers N to wait for N GPUs"):
        RayExecutor(order, address=address, workers=None, gpus=True)
    monkeypatch.setenv(ray_cluster.ADDRESS, address)
    default = RayExecutor(order, address=None, workers=None, gpus=False)
    assert default.size == 1  # machine
    default.start("1")
    default.release("1")
    assert list(default.events(0.1)) == []
    default.stop(1.0)


def test_a_device_with_a_number_is_refused() -> None:
    import torch

    with pytest.raises(
        UserError, match="--executor ray chooses a GPU for every worker; give --device cuda without a number"
    ):
        Placement(name="ray").executor(None, torch.device("cuda", 1), 1)  # type: ignore[arg-type]


def test_a_long_error_of_ray_becomes_the_line_that_says_what_happened() -> None:
    died = "The actor died unexpectedly.\n\tpid: 1\nThe actor is dead because its node has died. Node Id: 0f"
    assert _why(RuntimeError(died)) == "The actor is dead because its node has died"
    raised = "The actor died, ray::Actor.__init__()\n  File 'a.py'\nModuleNotFoundError: No module named 'kvbench'"
    assert _why(RuntimeError(raised)) == "ModuleNotFoundError: No module named 'kvbench'"


class Refuses:
    """A Ray that cannot connect. error: what it raises."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def init(self, *_: object, **__: object) -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)
        raise self.error


def test_a_ray_that_does_not_answer_is_one_line_and_signals_stay_kvbench_s() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    missing = ConnectionError("Could not find any running Ray instance. Please specify the one to connect to.")
    with pytest.raises(
        SetupError, match=r"^Ray does not answer at 'auto' \(Could not find any running Ray instance\)\.$"
    ):
        ray_cluster._connect(Refuses(missing), "auto", 1)
    with pytest.raises(Signalled):
        ray_cluster._connect(Refuses(SystemExit(15)), ray_cluster.OWN, 1)
    assert signal.getsignal(signal.SIGTERM) == handler
