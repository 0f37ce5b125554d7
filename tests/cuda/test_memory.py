"""Memory of a GPU: the plan beside the peak that was measured, and what happens when it runs out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.pretend_cuda import pretended_cuda
from support.runs import configuration, model_folder

from kvbench.config.run_config import Grid, MethodChoice
from kvbench.engine import steps
from kvbench.engine.graph import CaptureError
from kvbench.runner.cell_run import CellRun
from kvbench.runner.execute import execute
from kvbench.store import read_run


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model"))


def rows(model, out, name, method="gkv", device="cuda", task="walk/orbit-100", **changes):
    grid = Grid(methods=(MethodChoice(name=method),), budgets=(32,), tasks=(task,))
    settings = dict(limit=4, samples=2, max_new_tokens=24, slots=8, device=device, dtype="float32") | changes
    said: list[str] = []
    result = execute(
        replace(configuration(model, **settings), grids=(grid,)), out=out, run_name=name, notice=said.append
    )
    return read_run(result.run_dir).rows.sort_values("row_key"), said


ONE_SLOT = dict(slots=1, temperature=0.0)  # the prompt is the peak
MANY_SLOTS = dict(slots=64, temperature=0.0)  # a step is the peak
LONG_PROMPT = dict(task="lookup")
CASES = [(method, {}) for method in ("full", "gkv", "h2o", "rkv", "kvzip")]  # drawing is the peak of `full`
CASES += [(method, ONE_SLOT) for method in ("full", "tova")]
CASES += [("ada-kv", MANY_SLOTS), ("kvzip", LONG_PROMPT), ("snapkv", LONG_PROMPT)]


@pytest.mark.parametrize(("method", "changes"), CASES)
def test_the_plan_holds_the_measured_peak(model, tmp_path, method, changes, monkeypatch):
    """Without a graph: the pretended one keeps every tensor of a step, where CUDA's reuses their memory.

    Steps attend and draw in PyTorch here (`conftest`), so the plan must be told.
    """

    def refuse(*_):
        raise CaptureError("no graph")

    monkeypatch.setattr(steps, "StepGraph", refuse)
    with pretended_cuda():
        done, _ = rows(model, tmp_path, "r", method, limit=1, decode_attn="torch", **changes)
    planned, peak = int(done.device_bytes_planned.iloc[0]), int(done.device_bytes_peak.max())
    print(f"{method} {changes}: planned {planned:,}, measured {peak:,} bytes")
    assert peak <= planned
    assert peak > planned / 4


def test_out_of_memory_halves_the_slots_and_gives_the_same_tokens(model, tmp_path, monkeypatch):
    """The device has less memory than it said to the plan, so that allocations fail while the cell runs."""
    with pretended_cuda() as device:
        few, _ = rows(model, tmp_path, "few", slots=2)
        many, _ = rows(model, tmp_path, "many")
        capacity, run = int(few.device_bytes_peak.max() + many.device_bytes_peak.max()) // 2, CellRun.run

        def in_less_memory(cell):
            device.memory.capacity = capacity
            run(cell)

        monkeypatch.setattr(CellRun, "run", in_less_memory)
        done, said = rows(model, tmp_path, "less")
    assert set(done.status) == {"ok"}
    assert set(done.slots_planned) == {8}
    assert done.slots.min() < 8
    assert done.oom_retries.max() == len(said) > 0
    assert (done.slots == 8 // 2**done.oom_retries).all()
    assert "out of memory with 8 slots; going on with 4 (CUDA out of memory." in said[0]
    assert list(done.output_sha256) == list(many.output_sha256)
    assert (many.oom_retries == 0).all()
