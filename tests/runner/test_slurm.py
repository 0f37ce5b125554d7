"""Workers in Slurm jobs, by submitit's stand-in for Slurm on one machine; parameters and scripts of Slurm."""

from __future__ import annotations

import shlex
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.final_tables import differences
from support.runs import configuration, model_folder
from support.signals_to_workers import SignalsParents
from support.stub_workers import row_of

from kvbench.cli.app import main
from kvbench.config.run_config import Grid, MethodChoice
from kvbench.errors import SetupError, UserError
from kvbench.runner.execute import execute
from kvbench.runner.jobs import Job
from kvbench.runner.workers import slurm
from kvbench.runner.workers.executor import Noticed, Order
from kvbench.runner.workers.placement import Placement
from kvbench.runner.workers.sbatch import script
from kvbench.runner.workers.slurm_parameters import for_submitit, parse_parameters
from kvbench.store import Journal

GRID = Grid(methods=(MethodChoice(name="gkv"),), budgets=(32,), tasks=("walk/orbit-100",))
LOCAL = parse_parameters(["cluster=local"])


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, and no waiting for a shared disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(slurm, "POLL", 0.2)
    monkeypatch.setattr(slurm, "LATE", 0.5)
    return tmp_path / "cache" / "kvbench" / "slurm"


@pytest.mark.slow
def test_two_jobs_write_the_rows_of_one_process_also_when_one_is_killed_and_one_requeued(
    cache: Path, tmp_path: Path
) -> None:
    config = replace(configuration(model_folder(tmp_path / "model")), grids=(GRID,), slots=1)
    execute(config, out=tmp_path, run_name="one")
    progress = SignalsParents(tmp_path / "two" / "journal", signal.SIGKILL, signal.SIGUSR2)
    said: list[str] = []
    placement = Placement(name="slurm", workers=2, slurm=LOCAL)
    result = execute(config, out=tmp_path, run_name="two", placement=placement, progress=progress, notice=said.append)
    assert progress.left == []
    assert [text for text in said if "lost" in text and "is finished; its log is" in text] == said
    assert len(said) == 1
    assert (result.done, result.planned) == (24, 24)
    assert differences(tmp_path / "one", tmp_path / "two") == []
    assert "Requeued" in "".join(log.read_text() for log in cache.rglob("*_log.out"))
    assert not list((tmp_path / "two").rglob("*.pkl"))


def test_a_share_leaves_out_saved_rows_and_a_good_end_removes_the_cache(cache: Path, tmp_path: Path) -> None:
    config = replace(configuration(model_folder(tmp_path / "model")), grids=(replace(GRID, limit=2),))
    result = execute(config, out=tmp_path, run_name="r")
    assert result.run_dir is not None
    keys = tuple(row.key for row in result.plans[0].rows)
    order = Order(config=config, out=str(tmp_path), name="r", slots=tuple(p.plan for p in result.plans), device="cpu")
    assert slurm.Share(order, [Job(0, keys)])() == [slurm.Done(slurm.FIRST, len(keys))]
    executor = slurm.SlurmExecutor(order, workers=1, parameters=LOCAL, gpus=False)
    assert len(list(cache.iterdir())) == 1
    executor.stop(1.0)
    assert list(cache.iterdir()) == []


def test_a_requeued_share_reports_the_rows_of_all_its_lives(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [Job(0, ("aa", "ab")), Job(0, ("ba", "bb")), Job(1, ("ca",))]
    (tmp_path / "r").mkdir()
    with Journal(tmp_path / "r") as journal:
        for key in ("aa", "ab", "ba"):
            journal.append(row_of(key))
    order = Order(config=None, out=str(tmp_path), name="r", slots=(), device="cpu")  # type: ignore[arg-type]
    executed: list[Job] = []

    def execute_left(self: slurm.Share, left: list[Job]) -> list[slurm.Event]:
        executed.extend(left)
        return [slurm.Done(slurm.FIRST, 0), Noticed(slurm.FIRST, "slow"), *[slurm.Done(slurm.FIRST, 1)] * 2]

    monkeypatch.setattr(slurm.Share, "_execute", execute_left)
    told = slurm.Share(order, jobs)()
    assert executed == [Job(0, ()), Job(0, ("bb",)), Job(1, ("ca",))]
    assert [event.rows for event in told if isinstance(event, slurm.Done)] == [2, 2, 1]


class Silent:
    """A Slurm job that works for ever, as far as Slurm has said until now."""

    job_id = "12_0"

    def __init__(self, folder: Path) -> None:
        self.paths, self.cancelled = SimpleNamespace(result_pickle=folder / "none"), False
        self.asked = 0

    def done(self, force_check: bool = False) -> bool:
        self.asked += force_check
        return False

    def cancel(self, check: bool) -> None:
        self.cancelled = True


def test_a_share_whose_rows_are_all_saved_has_ended(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator does not wait for minutes until Slurm is asked again."""
    for name in ("POLL", "LATE", "SAVING", "ASK"):
        monkeypatch.setattr(slurm, name, 0.0)
    order = Order(config=None, out=str(tmp_path), name="r", slots=(), device="cpu")  # type: ignore[arg-type]
    executor, job = slurm.SlurmExecutor(order, workers=1, parameters=LOCAL, gpus=False), Silent(tmp_path)
    executor._running["1"] = slurm._Running([Job(0, ("aa",)), Job(0, ("ba", "bb"))], job)
    (tmp_path / "r").mkdir()
    with Journal(tmp_path / "r") as journal:
        for key in ("aa", "ba"):
            journal.append(row_of(key))
        assert slurm.Done("1", 1) in list(executor.events(0))
        assert slurm.Done("1", 2) not in list(executor.events(0))
        journal.append(row_of("bb"))
    assert slurm.Done("1", 2) in list(executor.events(0))
    assert job.cancelled
    assert job.asked == 3  # once per look
    executor.stop(0.0)


def test_a_machine_without_slurm_is_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    order = Order(config=None, out="results", name="r", slots=(), device="cpu")  # type: ignore[arg-type]
    with pytest.raises(SetupError, match=r"^this machine cannot submit Slurm jobs \(.*srun.*\)\.$"):
        slurm.SlurmExecutor(order, workers=1, parameters={}, gpus=False)
    assert list(cache.iterdir()) == []


def test_slurm_receives_an_array_with_the_parameters_and_a_stop_cancels_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch and scancel only note what they get: no Slurm is here."""
    for name, says in (
        ("srun", ""),
        ("sbatch", "cp $1 script; echo Submitted batch job 12"),
        ("scancel", "echo $@ >> gone"),
    ):
        command = tmp_path / "bin" / name
        command.parent.mkdir(exist_ok=True)
        command.write_text(f"#!/bin/sh\ncd {tmp_path}\n{says}\n")
        command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    order = Order(config=None, out=str(tmp_path), name="r", slots=(), device="cpu")  # type: ignore[arg-type]
    parameters = parse_parameters(["partition=gpu,time=90,reservation=mine"])
    executor = slurm.SlurmExecutor(order, workers=3, parameters=parameters, gpus=True)
    for worker in "123":
        executor.start(worker)
    assert sorted(event.worker for event in executor.events(0)) == ["1", "2", "3"]
    for worker in "12":
        executor.send(worker, [Job(0, (worker,))])
    list(executor.events(0))
    flags = {line[8:] for line in (tmp_path / "script").read_text().splitlines() if line.startswith("#SBATCH")}
    assert flags >= {"--array=0-1%2", "--partition=gpu", "--time=90", "--reservation=mine", "--gpus-per-node=1"}
    assert flags >= {"--job-name=kvbench-r", "--signal=USR2@90"}
    executor.stop(0.0)
    assert (tmp_path / "gone").read_text() == "12_0 12_1\n"


def test_parameters_keep_commas_in_values_and_know_which_names_submitit_has() -> None:
    found = parse_parameters(["partition=a,b,time=90", "gpus-per-task=2", "setup=module load a", "setup=echo b=c"])
    assert for_submitit(found, ["partition", "gpus_per_task", "time"], gpus=True) == {
        "timeout_min": 90,
        "slurm_partition": "a,b",
        "slurm_gpus_per_task": 2,
        "slurm_setup": ["module load a", "echo b=c"],
        "slurm_additional_parameters": {},
    }
    unknown = for_submitit(parse_parameters(["reservation=mine,exclusive=true"]), ["exclusive"], gpus=True)
    assert unknown["slurm_additional_parameters"] == {"reservation": "mine"}
    assert (unknown["slurm_exclusive"], unknown["gpus_per_node"], unknown["timeout_min"]) == (True, 1, 240)


@pytest.mark.parametrize("text", ["partition", "=gpu", "time=4:00", "cluster=pbs", "mem=1G,mem=2G", "Partition=gpu"])
def test_wrong_parameters_are_refused_with_their_text(text: str) -> None:
    with pytest.raises(UserError, match=r"^--slurm "):
        parse_parameters([text])


def test_the_script_runs_the_command_in_shards_and_says_how_to_join(tmp_path: Path) -> None:
    command = shlex.split("run -m 'gkv,h2o' --executor slurm --workers=3 --slurm mem=9G --run-name r --print-sbatch -q")
    parameters = parse_parameters(["mem=9G", "setup=module load cuda"])
    variables = {"KVBENCH_TASK": "walk", "KVBENCH_DATA": "it's $HOME"}
    text = script(command, variables, "r", "my results", 3, parameters, gpus=True)
    assert text.startswith("#!/bin/bash\n#SBATCH --job-name=kvbench-r\n#SBATCH --array=1-3\n")
    assert "\n#SBATCH --gpus-per-node=1\n#SBATCH --mem=9G\n#" in text
    place = "'\"'\"'my results'\"'\"'"
    assert f"--wrap 'kvbench join {place[:-5]}/r{place[-5:]}-[1-9]-of-3 --run-name r --out {place}'\n" in text
    said = tmp_path / "srun"
    said.write_text('#!/bin/sh\nprintf "%s\\n" "$@" "$KVBENCH_TASK" "$KVBENCH_DATA"\n')
    said.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_ARRAY_TASK_ID": "2"}
    without_setup = text.replace("module load cuda\n", "")
    words = subprocess.run(["bash", "-c", without_setup], env=environment, capture_output=True, text=True, check=True)
    expected = ["kvbench", "run", "-m", "gkv,h2o", "-q", "--run-name", "r", "--shard", "2/3", *variables.values()]
    assert words.stdout.split("\n")[:-1] == expected
    assert "#SBATCH --gpus" not in script(command, {}, "r", "results", 3, parameters, gpus=False)


def test_the_script_exports_variables_that_gave_settings(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    given = ["run", "--task", "walk", "--seed", "1", "--executor", "slurm", "--workers", "2", "--print-sbatch"]
    for name, value in {"SEED": "7", "METHOD": "full", "DATA": "my data", "NO_PROGRESS": "1"}.items():
        monkeypatch.setenv(f"KVBENCH_{name}", value)
    monkeypatch.setattr("sys.argv", ["kvbench", *given])
    assert main(given) == 0
    exported = [line for line in capsys.readouterr().out.splitlines() if line.startswith("export")]
    assert exported == ["export 'KVBENCH_DATA=my data'", "export KVBENCH_METHOD=full"]


@pytest.mark.parametrize(("name", "package"), [("ray", "ray"), ("slurm", "submitit")])
def test_a_missing_package_is_one_line_with_its_extra(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(SetupError, match=rf"^--executor {name} needs {package}: pip install 'kvbench\[{name}\]'\.$"):
        Placement(name=name).require_package()


@pytest.mark.parametrize("there", [12, 9])
def test_the_printed_join_names_the_shards_of_this_run_only(there: int, tmp_path: Path) -> None:
    """The results folder also has shards of other runs with similar names. If shards 10 to 12 made no folder, the
    pattern for numbers of two digits matches nothing."""
    mine = [f"my results/main-{number}-of-12" for number in range(1, there + 1)]
    for folder in (*mine, *(f"my results/main-{more}-3-of-12" for more in ("1", "02", "x")), "my results/main-1-of-2"):
        (tmp_path / folder).mkdir(parents=True)
    text = script(["run"], {}, "main", "my results", 12, {}, gpus=False)
    [wrapped] = [line.partition("--wrap ")[2] for line in text.splitlines() if "--wrap" in line]
    [join] = shlex.split(wrapped)
    kvbench = tmp_path / "bin" / "kvbench"
    kvbench.parent.mkdir()
    kvbench.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    kvbench.chmod(0o755)
    environment = {"PATH": f"{kvbench.parent}:/usr/bin:/bin"}
    ended = subprocess.run(
        ["sh", "-c", join], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    said = ended.stdout.splitlines()
    assert (said[0], sorted(said[1:-4])) == ("join", sorted(mine))
    assert said[-4:] == ["--run-name", "main", "--out", "my results"]
