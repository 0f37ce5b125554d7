"""When memory runs out in a training, the error names what `kvbench train` has: settings of the recipe."""

from __future__ import annotations

import re

import pytest
import torch

from kvbench.cli.app import main
from kvbench.engine.prefill import PromptReader
from kvbench.errors import SetupError
from kvbench.train.out_of_memory import OF_DATA, explained

RL = {"slots": 16, "micro": 1, "recompute": "auto", "precision": "float32", "lora": 0, "max_tokens": 9}


def test_answers_that_do_not_fit_into_memory(tmp_path, monkeypatch, capsys):
    def short(*args, **how):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(PromptReader, "read", short)
    command = ["train", "lookaheadkv", "--model", "tiny", "--steps", "1", "--samples", "2", "--batch", "1", "-q"]
    assert main([*command, "--out", str(tmp_path)]) == 3
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")] == [
        "error: out of memory (CUDA out of memory. Tried to allocate 2.00 GiB.). Use shorter texts (--opt max_prompt=N"
        ", --opt max_tokens=N) or a larger machine; --dry-run shows the memory of each phase."
    ]


@pytest.mark.parametrize(
    ("settings", "cures"),
    [
        (
            RL,
            "--opt recompute=on, --opt precision=bfloat16, --opt slots=4, --opt lora=16, shorter texts (",
        ),
        (
            {"slots": 2, "lora": 8, "recompute": "on", "tokens": 9},
            "shorter texts (--opt tokens=N) or a larger machine",
        ),
        ({}, "a larger machine;"),
    ],
)
def test_only_settings_that_lower_memory_are_named(settings, cures):
    with pytest.raises(SetupError, match=re.escape(f"out of memory (MemoryError). Use {cures}")), explained(settings):
        raise MemoryError


def test_work_before_the_first_step_has_cures_of_its_own():
    with pytest.raises(SetupError, match="Use --opt precision=bfloat16, shorter texts"), explained(RL, OF_DATA):
        raise MemoryError


def test_other_errors_stay_as_they_are():
    with pytest.raises(ValueError, match="a"), explained(RL):
        raise ValueError("a")
