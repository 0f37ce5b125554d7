"""`make gpu-check`: its plan, its table, and its end without a GPU. The measurements themselves need a GPU."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch
from tools import gpu_check

from kvbench.runner.bench.shapes import SHAPES


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
    assert {call.shape for call in plan} == set(gpu_check.SHAPES) <= set(SHAPES)
    budgets = {int(budget) for call in plan if call.method != "full" for budget in call.budget.split(",")}
    assert budgets == {512, 1024, 2048, 4096}
    full = [call for call in plan if call.method == "full"]
    assert {int(prompt) for call in full for prompt in call.prompt.split(",")} == {8192, 16384, 32640}
    assert {call.baseline for call in full} == {"transformers,continuous"}


def test_a_measurement_is_a_row_of_the_table(tmp_path):
    """The same code on a small model and the CPU."""
    more = ("--device", "cpu", "--dtype", "float32", "--interval", "8")
    small = gpu_check.Call("A", "full,tova", "16", "20", 2, 4, "transformers", more)
    wrong = gpu_check.Call("A", "tova", "16", "16", 2, 4, "magic", more)
    results = [*gpu_check.measure([small, wrong], time.monotonic() + 300), *gpu_check.measure([small], 0.0)]
    page = gpu_check.write(tmp_path, "NVIDIA Test 1", "torch 0", "all passed", results).read_text()
    rows = [line for line in page.splitlines() if line.startswith("| A |")]
    assert (tmp_path / "nvidia-test-1.json").exists()
    assert [row.split(" | ")[2] for row in rows[:3]] == ["full", "tova @16", "transformers"]
    assert {row.count(" |") for row in rows} == {len(gpu_check.COLUMNS)}
    assert "failed: error: --baseline 'magic'" in rows[3]
    assert "not run: no time left" in rows[4]


INTERRUPTED = """
import json, time
try:
    time.sleep(600)
except KeyboardInterrupt:
    print(json.dumps({"rows": []}))
    raise
"""


def test_a_call_for_which_the_time_is_short_leaves_what_it_has_measured(monkeypatch):
    """`kvbench bench` prints its document when it is interrupted."""
    monkeypatch.setattr(gpu_check, "LEAST", 0.0)
    monkeypatch.setattr(gpu_check.Call, "command", lambda self: [sys.executable, "-c", INTERRUPTED, "", "bench"])
    call = gpu_check.Call("A", "full", "16", "20", 1, 4)
    [(_, found, why)] = gpu_check.measure([call], time.monotonic() + gpu_check.GRACE + 6)
    assert (found, why) == ({"rows": []}, "not finished: no time left")


def test_a_call_that_fails_after_its_first_figures_is_a_failure(monkeypatch):
    code = "import sys; print('{\"rows\": []}'); print('error: broken', file=sys.stderr); sys.exit(1)"
    monkeypatch.setattr(gpu_check.Call, "command", lambda self: [sys.executable, "-c", code, "", "bench"])
    [(_, found, why)] = gpu_check.measure([gpu_check.Call("A", "full", "16", "20", 1, 4)], time.monotonic() + 60)
    assert (found, why) == ({"rows": []}, "failed: error: broken")
