"""Weights that do not fit the model's config are refused; transformers would replace them by random numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.runs import model_folder

from kvbench.cli.app import main
from kvbench.errors import SetupError
from kvbench.scoring.judge.local import LocalJudge
from kvbench.sources.model_weights import difference
from kvbench.store import manifest, read_run

NAME = "model.layers.1.mlp.down_proj.weight"


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


CHANGES = pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensors: tensors.pop(NAME), f"the files lack tensors that config.json asks for: {NAME}"),
        (
            lambda tensors: [tensors.pop(name) for name in (NAME, NAME.replace("1", "0"))],
            f"the files lack tensors that config.json asks for: {NAME.replace('1', '0')} and 1 more",
        ),
        (
            lambda tensors: tensors.update({NAME: tensors[NAME][:, 1:].contiguous()}),
            f"tensor '{NAME}' has shape [64, 95] in the files, but [64, 96] by config.json",
        ),
    ],
)


@CHANGES
def test_a_run_refuses_its_model(
    change: Callable[..., object], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_folder(tmp_path / "model")
    change_weights(folder, change)
    code = main(["run", *f"--method full --task walk --limit 1 --quiet --out {tmp_path} --model {folder}".split()])
    assert code == 3
    assert f"error: model '{folder}' cannot be loaded: {reason}. Download it again, or " in capsys.readouterr().err


@CHANGES
def test_a_judge_is_refused(change: Callable[..., object], reason: str, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "judge")
    change_weights(folder, change)
    with pytest.raises(SetupError) as raised:
        LocalJudge(folder).ask("", "")
    assert reason in str(raised.value)


def test_buffers_and_what_quantisers_add_may_be_missing() -> None:
    layer = torch.nn.BatchNorm1d(2)
    layer.register_parameter("weight_zero_point", torch.nn.Parameter(torch.zeros(2)))
    report = {"mismatched_keys": set(), "unexpected_keys": set(), "missing_keys": {"running_mean", "weight_zero_point"}}
    assert difference(layer, report) == ""
    report["missing_keys"].add("bias")
    assert difference(layer, report) == "the files lack tensors that config.json asks for: bias"


@pytest.mark.parametrize("again", ["--run-name r", "--resume r"])
def test_the_run_goes_on_after_a_repair(again: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing was measured with the incomplete weights, so the run begins anew with the others."""
    folder = model_folder(tmp_path / "model")
    whole = (folder / "model.safetensors").read_bytes()
    change_weights(folder, lambda tensors: tensors.pop(NAME))
    run = f"run --method full --task walk --limit 1 --quiet --out {tmp_path} --model {folder} --run-name r".split()
    assert main(run) == 3
    (folder / "model.safetensors").write_bytes(whole)
    asked = f"run --quiet --out {tmp_path} --resume r".split() if again.startswith("--resume") else run
    assert main(asked) == 0, capsys.readouterr().err
    rows = read_run(tmp_path / "r").rows
    assert set(rows["status"]) == {"ok"}
    listed = manifest.read(tmp_path / "r")
    digests = [entry["hash"] for entry in listed["environment"]["model_files"] if entry["name"] == "model.safetensors"]
    assert digests == [hashlib.sha256(whole).hexdigest()]
    assert listed["planned"] == len(rows)


def test_with_a_row_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = model_folder(tmp_path / "model")
    run = f"run --method full --task walk --limit 1 --quiet --out {tmp_path} --model {folder} --run-name r".split()
    assert main(run) == 0
    change_weights(folder, lambda tensors: tensors[NAME].add_(1))
    assert main(run) == 2
    assert "changed since run 'r' began" in capsys.readouterr().err


def test_only_a_run_replaces_the_record_of_a_run_without_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_folder(tmp_path / "model")
    whole = (folder / "model.safetensors").read_bytes()
    change_weights(folder, lambda tensors: tensors.pop(NAME))
    run = f"run --method full --task walk --limit 1 --quiet --out {tmp_path} --model {folder} --run-name r".split()
    assert main(run) == 3
    record = (tmp_path / "r" / manifest.NAME).read_bytes()
    main(["score", "r", "--out", str(tmp_path)])
    assert "internal error" not in capsys.readouterr().err
    assert (tmp_path / "r" / manifest.NAME).read_bytes() == record
    (tmp_path / "r" / "seal.json").unlink(missing_ok=True)
    (tmp_path / "r" / "rows.parquet").write_bytes(b"of a published run")  # whose journal and seal were not copied
    (folder / "model.safetensors").write_bytes(whole)
    assert main(run) == 2
    assert (tmp_path / "r" / manifest.NAME).read_bytes() == record
    for name in ("rows.parquet", "texts.parquet"):
        (tmp_path / "r" / name).unlink()
    main(["score", "r", "--out", str(tmp_path)])  # seals tables without rows
    assert main(run) == 0
