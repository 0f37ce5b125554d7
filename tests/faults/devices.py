"""Memory that runs out, numbers that are none, devices that are lost. F17, F18, F31."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from faults.stage import GRID, ROWS, RUN, Stage, scenario
from safetensors.torch import load_file, save_file
from support.commands import Before, Tell, at_forward

from kvbench import tiny


@scenario("F17")
def out_of_memory(stage: Stage) -> None:
    """The device holds two sequences at a time; later one prompt does not fit even alone."""
    wide = RUN.replace("--slots 2", "--slots 6")
    ended = stage.done(wide, _refusing(lambda ids: ids.shape[0] > 2))
    assert "internal error" not in ended.err
    rows = stage.rows()
    assert len(rows) == ROWS
    assert set(rows["status"]) == {"ok"}
    assert rows["slots"].max() <= 2  # of six; the row says with how many it was made
    assert list(rows["output_sha256"]) == list(stage.rows(stage.undisturbed)["output_sha256"])

    shutil.rmtree(stage.run_dir)
    file, marked = _questions(stage)
    line = f"run --method full,knorm --budget 32 --task-file {file} --max-new-tokens 8 --slots 2 -q --run-name r1"
    ended = stage.call(line, _refusing(lambda ids: bool(torch.isin(ids, marked).any())))
    assert ended.code == 4, ended
    assert "2 oom" in ended.err
    rows = stage.rows().set_index("doc_id")
    assert set(rows.loc["large", "status"]) == {"oom"}
    assert rows.loc["large", "score"].isna().all()
    assert set(rows.drop("large")["status"]) == {"ok"}
    stage.done(stage.typed(ended.err, "run") + " -q")  # where there is room again
    assert set(stage.rows()["status"]) == {"ok"}


def _refusing(too_much: Any) -> Before:
    """A device that has no memory for some batches."""

    def before(tell: Tell) -> None:
        def check(ids: torch.Tensor) -> None:
            if ids.device.type != "meta" and too_much(ids):  # a model's shape is learnt without memory
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        at_forward(check)

    return before


def _questions(stage: Stage) -> tuple[Path, torch.Tensor]:
    """Three questions, and the tokens that only the prompt of one of them has."""
    asked = {"small": "1 + 1 = ?", "large": "1 € + 1 € = ?", "other": "2 + 2 = ?"}
    path = stage.folder / "questions.jsonl"
    path.write_text("".join(json.dumps({"id": k, "question": q, "answer": "2"}) + "\n" for k, q in asked.items()))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.path())
    usual = set(tokenizer("".join(map(chr, range(32, 127))) + " ".join(map(chr, range(32, 127))))["input_ids"])
    return path, torch.tensor(sorted(set(tokenizer("€")["input_ids"]) - usual))


@scenario("F18")
def not_a_number(stage: Stage) -> None:
    """NaN appears after the last layer, where only logits show it, or in the keys that the method scores."""
    model = Path(shutil.copytree(tiny.path(), stage.folder / "model", ignore=shutil.ignore_patterns("*.py", "__*")))
    line = f"run --model ./model {GRID} --max-new-tokens 24 --slots 1 -q --run-name r1".replace("full,knorm", "knorm")
    for name in ("model.norm.weight", "model.layers.3.self_attn.k_norm.weight"):
        weights = load_file(tiny.path() / "model.safetensors")
        weights[name].fill_(float("nan"))
        save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
        ended = stage.call(line.replace("--limit 3", "--limit 6"))
        assert ended.code in (3, 4), ended
        assert "dtype" in ended.err
        rows = stage.rows()
        assert 5 <= len(rows) < 12
        assert set(rows["status"]) == {"nan_logits"}
        assert rows["score"].isna().all()
        assert rows["note"].str.contains(r"step 0").all(), rows["note"].tolist()
        shutil.rmtree(stage.run_dir)


@scenario("F31")
def device_lost(stage: Stage) -> None:
    """Some rows are done when the device goes; every later call of it fails."""
    for error in (
        RuntimeError("CUDA error: uncorrectable ECC error encountered"),
        RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
    ):
        command = stage.start(RUN, _losing(error))
        events = list(command.events())
        ended = command.end()
        assert (ended.code, ended.out) == (3, ""), ended
        assert "Traceback" not in ended.err
        assert "internal error" not in ended.err
        assert str(error).removeprefix("CUDA error: ") in ended.err
        saved = sum(event.startswith("saved") for event in events)
        assert 0 < saved < ROWS
        assert events.count("lost") == 1, "the device was asked again"
        assert len(stage.rows()) >= saved
        assert re.search(r"kvbench run --resume r1", ended.err)
        stage.done("run --resume r1 -q")
        stage.check_final()
        shutil.rmtree(stage.run_dir)


def _losing(error: RuntimeError) -> Before:
    def before(tell: Tell) -> None:
        from support.commands import watch

        watch(tell, commit_seconds=0.0)
        passes = 0

        def forward(ids: torch.Tensor) -> None:
            nonlocal passes
            passes += 1
            if passes > 100:
                tell("lost")
                raise error

        at_forward(forward)

    return before
