"""Runs with --adapter: the adapter changes answers and rows, a changed one is refused, wrong ones get a line."""

from __future__ import annotations

import json
import shutil

import pytest
from support import adapters as made
from support import zoo

from kvbench import tiny
from kvbench.cli.app import main
from kvbench.engine.model.load import load
from kvbench.sources import adapters
from kvbench.store import read_rows, read_texts

LINE = (
    "run --task walk/orbit-100 --limit 2 --samples 1 --temperature 0 --method full,gkv --budget 32 --interval 8 "
    "--max-new-tokens 16 --json -q"
)
RUN = LINE.split()


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Runs one command line in a folder of its own; its code, last line and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVBENCH_NO_PROGRESS", "1")

    def run(*arguments: str):
        capsys.readouterr()
        code = main(arguments)
        out, err = capsys.readouterr()
        return code, json.loads(out.splitlines()[-1]) if code == 0 and "--json" in arguments else out, err

    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    pytest.importorskip("peft", reason="peft trains and merges adapters; it is in the extra 'adapters'")
    model = load(str(tiny.path()), device="cpu", dtype="float32").model
    return made.train(model, tmp_path_factory.mktemp("trained") / "taught")


@pytest.fixture
def two_runs(command, tmp_path, trained):
    """A run of the built-in model, and one of the same with the trained adapter in the folder ``taught``."""
    shutil.copytree(trained, tmp_path / "taught")
    for name, more in {"base": [], "adapted": ["--adapter", "taught"]}.items():
        code, document, err = command(*RUN, *more, "--run-name", name)
        assert code == 0, err
        assert document["rows_done"] == 4
    return {name: read_rows(tmp_path / "results" / name) for name in ("base", "adapted")}


def test_an_adapter_changes_the_answers_and_the_rows_identity(two_runs, command, tmp_path):
    base, adapted = two_runs["base"], two_runs["adapted"]
    assert base["adapter"].isna().all()
    assert set(adapted["adapter"]) == {adapters.find(str(tmp_path / "taught")).identity}
    assert adapted["adapter"][0].startswith("taught@")
    assert not set(base["row_key"]) & set(adapted["row_key"])
    assert set(base["model_revision"]) == set(adapted["model_revision"])
    before, after = (list(read_texts(tmp_path / "results" / name)["output"]) for name in ("base", "adapted"))
    assert before != after

    code, _, err = command("report", "base", "adapted")
    assert code == 2
    assert "adapter" in err
    code, _, err = command("compare", "base", "adapted")
    assert code == 2
    assert "adapter is none in base and taught@" in err


def test_without_an_adapter_nothing_of_it_enters_a_rows_key(two_runs, tmp_path):
    """A row's key is a hash of the run's model, so that runs of earlier versions keep their keys."""
    for name, more in {"base": set(), "adapted": {"adapter"}}.items():
        record = json.loads((tmp_path / "results" / name / "run.json").read_text())
        assert set(record["environment"]["model"]) == {"model", "model_revision"} | more


def test_a_resumed_run_wants_its_adapter_unchanged(two_runs, command, tmp_path):
    code, document, err = command("run", "--resume", "adapted", "--json", "-q")
    assert code == 0, err
    code, document, err = command("replay", "--run", "adapted", "--method", "gkv", "--budget", "24", "--json", "-q")
    assert code == 0, err
    assert document["adapter"].startswith("taught@")
    code, _, err = command("score", "adapted", "--all", "-q")
    assert code == 0, err

    retrained = load(str(tiny.path()), device="cpu", dtype="float32").model
    made.train(retrained, tmp_path / "taught", steps=3)
    for line in ("run --resume adapted -q", "replay --run adapted --method gkv --budget 24 -q"):
        code, _, err = command(*line.split())
        assert code == 2
        assert "adapter_model.safetensors of the adapter changed since run 'adapted' began" in err
    code, _, err = command("run", "--resume", "adapted", "--adapter", "other", "-q")
    assert code == 2
    assert "--adapter other differs from the run's taught" in err


def test_a_dry_run_plans_and_refuses(trained, command, tmp_path):
    code, document, err = command(*RUN, "--adapter", str(trained), "--dry-run")
    assert code == 0, err
    assert len(document["plan"]) == 2
    zoo.repository(tmp_path / "other", zoo.configuration("qwen3", {}))
    for more in (["--dry-run"], []):
        code, _, err = command(*RUN, "--model", "./other", "--adapter", str(trained), *more)
        assert code == 2
        assert "does not fit the model: size mismatch for" in err
        assert len(err.splitlines()) == 1
    assert not (tmp_path / "results").exists()


def test_wrong_adapters_get_a_line_each(command, tmp_path):
    """None of these needs peft."""
    model = load(str(tiny.path()), device="cpu", dtype="float32").model
    for name, changes in {
        "ia3": {"peft_type": "IA3"},
        "prompt": {"peft_type": "PROMPT_TUNING"},
        "pickled": {},
        "empty": {},
        "short": {},
        "broken": {},
    }.items():
        made.write(tmp_path / name, made.low_rank(model), **changes)
    (tmp_path / "pickled" / adapters.WEIGHTS).rename(tmp_path / "pickled" / "adapter_model.bin")
    (tmp_path / "empty" / adapters.WEIGHTS).unlink()
    weights = (tmp_path / "short" / adapters.WEIGHTS).read_bytes()
    (tmp_path / "short" / adapters.WEIGHTS).write_bytes(weights[:-10])
    (tmp_path / "broken" / adapters.CONFIG).write_text("{")
    (tmp_path / "folder").mkdir()
    shutil.copytree(tiny.path(), tmp_path / "both", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    shutil.copy(tmp_path / "ia3" / adapters.CONFIG, tmp_path / "both")
    for arguments, code, words in [
        ("--adapter none", 3, "adapter folder 'none' does not exist; --adapter takes a folder that peft has saved."),
        ("--adapter folder", 3, "'folder' has no adapter_config.json; it is not an adapter of peft."),
        (
            "--adapter prompt",
            2,
            "merges LORA only. Its learned prompt cannot be merged into weights; train a LoRA adapter.",
        ),
        ("--adapter ia3", 2, "adapter 'ia3' is of type 'IA3'; kvbench merges LORA only. Merge it with peft"),
        ("--adapter pickled", 3, "adapter 'pickled' has only pickle weights (adapter_model.bin)"),
        ("--adapter empty", 3, "adapter 'empty' has no adapter_model.safetensors. Copy it again."),
        ("--adapter short", 3, "adapter_model.safetensors is damaged (header says"),
        ("--adapter broken", 3, "cannot be read as JSON"),
        ("--model ./both", 3, "'./both' holds an adapter (adapter_config.json); give the base model with --model"),
        ("--model ./ia3", 3, "'./ia3' holds an adapter (adapter_config.json); give the base model with --model"),
    ]:
        for more in (["--dry-run"], []):
            ended, _, err = command(*RUN, *arguments.split(), *more)
            errors = [line for line in err.splitlines() if line.startswith("error: ")]
            assert (ended, len(errors)) == (code, 1), err
            assert words in errors[0]


def test_a_machine_without_peft_is_told_what_to_install(command, tmp_path, monkeypatch):
    model = load(str(tiny.path()), device="cpu", dtype="float32").model
    made.write(tmp_path / "a", made.low_rank(model))
    there = adapters.importlib.util.find_spec
    monkeypatch.setattr(adapters.importlib.util, "find_spec", lambda name: None if name == "peft" else there(name))
    code, _, err = command(*RUN, "--adapter", "a")
    assert code == 3
    assert "error: --adapter needs peft: pip install 'kvbench[adapters]'.\n" in err
