"""`make gpu-check`: its plan, its table, and its end without a GPU. The measurements themselves need a GPU."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch
from tools import gpu_check

from kvbench.runner.bench import SHAPES


def test_without_a_gpu_it_says_so():
    if torch.cuda.is_available():
        pytest.skip("here is a GPU")
    done = subprocess.run([sys.executable, gpu_check.__file__], capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stderr.splitlines() == [
        "gpu-check: this machine has no NVIDIA GPU that torch can use; nothing was measured."
    ]


def test_the_plan_covers_shapes_budgets_and_lengths():
    plan = gpu_check.plan()
    assert {speed.shape for speed in plan} == set(gpu_check.SHAPES) <= set(SHAPES)
    assert {speed.budget for speed in plan if speed.method != "full"} == {512, 1024, 2048, 4096}
    assert {speed.prompt + 128 for speed in plan if speed.method == "full"} == {8192 + 128, 16384 + 128, 32768}


def test_a_measurement_is_a_row_of_the_table(tmp_path):
    """The same code on a small model and the CPU."""
    more = ("--device", "cpu", "--dtype", "float32", "--interval", "8", "--new-tokens", "4")
    small = [gpu_check.Speed("A", "full", 16, 20, 2, "transformers", more), gpu_check.Speed("A", "tova", 16, 16, 2)]
    wrong = gpu_check.Speed("A", "tova", 16, 16, 2, "magic", more)
    results = gpu_check.measure([small[0], wrong], time.monotonic() + 300) + gpu_check.measure([small[1]], 0.0)
    page = gpu_check.write(tmp_path, "NVIDIA Test 1", "torch 0", "all passed", results).read_text()
    rows = [line for line in page.splitlines() if line.startswith("| A |")]
    assert (tmp_path / "nvidia-test-1.json").exists()
    assert rows[0].startswith("| A | full | all | 20 | 2 | ")
    assert "-" not in rows[0]
    assert "failed: error: --baseline 'magic'" in rows[1]
    assert "not run: no time left" in rows[2]
