"""Out of memory (F17), logits that are no numbers (F18), a device that fails (F31)."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from support.folders import TESTS
from support.runs import configuration, model_folder

from kvbench.cli.app import main
from kvbench.config.run_config import Grid, MethodChoice
from kvbench.console import faults
from kvbench.engine import loop, sampler, setup, steps
from kvbench.engine.attention.geometry import own_failures
from kvbench.engine.loop import Engine
from kvbench.engine.prefill import PromptReader
from kvbench.engine.state import Drawing, State
from kvbench.engine.steps import DecodeSteps
from kvbench.errors import SetupError
from kvbench.records import Sampling
from kvbench.runner.execute import execute
from kvbench.store import read_run

CUDA = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
CPU = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "8589934592 bytes. Error code 12 (Cannot allocate memory)"
)
ECC = RuntimeError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronous")
TASK = "walk/orbit-100"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model"))


def small(model, *methods, task=TASK, **changes):
    """Four questions with two samples each."""
    grid = Grid(methods=tuple(MethodChoice(name=m) for m in methods or ("gkv",)), budgets=(32,), tasks=(task,))
    settings = dict(limit=4, max_new_tokens=24, slots=4) | changes
    return replace(configuration(model, **settings), grids=(grid,))


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    """The rows of undisturbed runs with 1, 2 and 4 slots, by question, sample and slots."""
    out = tmp_path_factory.mktemp("alone")
    found = {}
    for slots in (1, 2, 4):
        rows = read_run(execute(small(model, slots=slots), out=out, run_name=f"s{slots}").run_dir).rows
        found |= {(r.doc_id, r.sample, slots): r.output_sha256 for r in rows.itertuples()}
    return found


class Memory:
    """Memory that holds `fits` slots; a step or prompt beyond that, after the first `spared` ones, raises `error`."""

    def __init__(self, monkeypatch, fits, error, where, spared=0):
        self.engine, self.raised, self.calls, self.caches = None, 0, 0, []
        owner, name = {"prefill": (PromptReader, "read"), "decode": (DecodeSteps, "_step")}[where]
        work, init = getattr(owner, name), Engine.__init__

        def made(engine, *args, **kwargs):
            assert [cache() for cache in self.caches if cache() is not None] == []  # freed before another try
            init(engine, *args, **kwargs)
            self.engine = engine
            self.caches.append(weakref.ref(engine.cache))

        def guarded(worker, *args, **kwargs):
            self.calls += 1
            if self.engine.cache.slots > fits and self.calls > spared:
                self.raised, self.engine = self.raised + 1, None
                raise type(error)(*error.args)  # a new one: a traceback holds the engine
            return work(worker, *args, **kwargs)

        monkeypatch.setattr(Engine, "__init__", made)
        monkeypatch.setattr(owner, name, guarded)


@pytest.mark.parametrize("error", [CUDA, CPU, MemoryError()], ids=["cuda", "cpu", "python"])
@pytest.mark.parametrize(("where", "spared"), [("prefill", 2), ("decode", 30)])
def test_out_of_memory_halves_the_slots_and_every_row_says_so(
    model, alone, tmp_path, monkeypatch, error, where, spared
):
    said: list[str] = []
    memory = Memory(monkeypatch, 1, error, where, spared)
    result = execute(small(model), out=tmp_path, run_name="r", notice=said.append)
    rows = read_run(result.run_dir).rows
    assert (result.done, dict(result.failed), len(rows)) == (8, {}, 8)
    assert set(rows.status) == {"ok"}
    assert memory.raised == 2
    assert 1 in set(rows.slots)
    if where == "decode":
        assert 4 in set(rows.slots)  # what was made before is kept
    assert set(rows.slots_planned) == {4}
    assert rows.oom_retries.tolist() == [{4: 0, 2: 1, 1: 2}[slots] for slots in rows.slots]
    assert rows.roofline_share.notna().all()  # each smaller number of slots is planned again
    assert rows.groupby("slots").device_bytes_planned.nunique().eq(1).all()
    assert rows.sort_values("slots").device_bytes_planned.is_monotonic_increasing
    assert all(alone[r.doc_id, r.sample, r.slots] == r.output_sha256 for r in rows.itertuples())
    halvings = [f"{TASK} gkv @32: out of memory with {n} slots; going on with {n // 2}" for n in (4, 2)]
    assert [line.partition(" (")[0] for line in said] == halvings


def test_every_cell_starts_with_its_own_slots(model, tmp_path, monkeypatch):
    """A row's slots must not depend on the cells that the same process ran before it."""
    step = DecodeSteps._step

    def guarded(steps):
        if type(steps.writer.rules.method).__name__ == "GKV" and steps.cache.slots > 2:
            raise CUDA
        step(steps)

    monkeypatch.setattr(DecodeSteps, "_step", guarded)
    result = execute(small(model, "gkv", "h2o"), out=tmp_path, run_name="r", notice=lambda text: None)
    rows = read_run(result.run_dir).rows
    assert rows.groupby("method").slots.unique().map(list).to_dict() == {"gkv": [2], "h2o": [4]}


def questions(path: Path, lengths: tuple[int, ...]) -> str:
    rows = [{"id": f"q{n}", "question": "x" * n, "answer": "1"} for n in lengths]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_sequence_that_does_not_fit_alone_is_a_row_and_the_others_go_on(model, tmp_path, monkeypatch):
    file = questions(tmp_path / "q.jsonl", (10, 900, 20))
    config = small(model, task="file/q", task_file=file, limit=None)
    read = PromptReader.read

    def guarded(reader, request, *args, **kwargs):
        if len(request.prompt_ids) > 300:
            raise CPU
        return read(reader, request, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(PromptReader, "read", guarded)
        result = execute(config, out=tmp_path / "out", run_name="r", notice=lambda text: None)
    rows = read_run(result.run_dir).rows.set_index("doc_id")
    assert (result.done, dict(result.failed)) == (6, {"oom": 2})
    assert list(rows.loc["q900"].status) == ["oom", "oom"]
    assert rows.loc["q900"].score.isna().all()
    assert rows.loc["q900"].slots.tolist() == [1, 1]
    assert rows.loc["q900"].note.str.contains("does not fit into memory: .*can't allocate memory").all()
    assert set(rows.drop("q900").status) == {"ok"}
    again = execute(config, out=tmp_path / "out", run_name="r", resume=True)  # with more memory
    assert (again.done, dict(again.failed)) == (6, {})
    assert set(read_run(result.run_dir).rows.status) == {"ok"}


def test_an_engine_that_cannot_be_made_for_the_longest_prompt_serves_the_others(model, tmp_path, monkeypatch):
    file = questions(tmp_path / "q.jsonl", (10, 900, 20))
    config = small(model, "full", task="file/q", task_file=file, limit=None)
    make = setup.make_cache

    def guarded(geometry, method, shape, *args):
        if shape.rows > 400:
            raise MemoryError
        return make(geometry, method, shape, *args)

    monkeypatch.setattr(setup, "make_cache", guarded)
    result = execute(config, out=tmp_path / "out", run_name="r", notice=lambda text: None)
    rows = read_run(result.run_dir).rows
    assert dict(result.failed) == {"oom": 2}
    assert set(rows[rows.status == "oom"].doc_id) == {"q900"}
    assert len(rows) == 6


LIMITED = """
import resource, sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from kvbench import tiny
from kvbench.config.run_config import Grid, MethodChoice
from kvbench.runner.execute import execute
from support.runs import configuration
import torch
torch.set_num_threads(1)
out = Path(sys.argv[2])
grid = Grid(methods=(MethodChoice(name="full"),), tasks=("walk/orbit-100",))
def config(slots):
    made = configuration(tiny.path(), limit=2, samples=1, max_new_tokens=8, slots=slots)
    return replace(made, grids=(grid,))
execute(config(1), out=out, run_name="before")  # all that is imported and loaded once lies in memory now
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + int(sys.argv[3]), resource.RLIM_INFINITY))
result = execute(config(16384), out=out, run_name="limited")
print(result.done, dict(result.failed))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS")
def test_a_real_limit_on_memory_halves_the_slots(tmp_path):
    command = [sys.executable, "-c", LIMITED, str(TESTS), str(tmp_path), str(400 << 20)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "2 {}"
    rows = read_run(tmp_path / "limited").rows
    assert set(rows.status) == {"ok"}
    [slots] = {int(n) for n in rows.slots}
    assert 1 < slots < 16384
    lines = [line for line in done.stderr.splitlines() if "out of memory with" in line]
    assert f"going on with {slots} (" in lines[-1]
    assert len(lines) == (16384 // slots).bit_length() - 1


@pytest.mark.parametrize(
    "error", [ECC, torch.AcceleratorError("CUDA error: device-side assert triggered")], ids=["ECC", "assert"]
)
def test_a_device_that_fails_ends_the_run_with_its_rows_saved(model, tmp_path, monkeypatch, error):
    memory = Memory(monkeypatch, 0, error, "decode", spared=30)
    with pytest.raises(SetupError) as caught:
        execute(small(model), out=tmp_path, run_name="r", notice=lambda text: None)
    saved = read_run(tmp_path / "r").saved
    assert caught.value.exit_code == 3
    assert str(caught.value) == (
        f"device cpu failed ({faults.first_line(error)}): {saved} of 8 rows saved; "
        f"continue with kvbench run --resume r --out {tmp_path}."
    )
    assert 0 < saved < 8
    assert memory.raised == 1  # no other try
    monkeypatch.undo()
    assert execute(small(model), out=tmp_path, run_name="r", resume=True).done == 8


def test_which_failures_are_of_memory_and_which_of_the_device():
    memory = [CUDA, CPU, MemoryError(), RuntimeError("std::bad_alloc"), RuntimeError("CUDA error: out of memory")]
    device = [ECC, RuntimeError("CUDA error: an illegal memory access was encountered"), RuntimeError("cudaErrorX")]
    neither = [RuntimeError("shape mismatch"), ValueError("out of memory"), KeyError("cuda error")]
    assert all(faults.out_of_memory(e) and not faults.device_failed(e) for e in memory)
    assert all(faults.device_failed(e) and not faults.out_of_memory(e) for e in device)
    assert not any(faults.device_failed(e) or faults.out_of_memory(e) for e in neither)
    wrapped = SetupError("mine failed")
    wrapped.__cause__ = CUDA
    assert faults.out_of_memory(wrapped)


def test_five_rows_of_nan_end_the_cell_with_a_hint_and_the_others_go_on(model, tmp_path, monkeypatch):
    draw = DecodeSteps._draw

    def broken(steps, logits, state):
        of_gkv = type(steps.writer.rules.method).__name__ == "GKV"
        return draw(steps, logits * float("nan") if of_gkv else logits, state)

    said: list[str] = []
    config = small(model, "gkv", "h2o")
    with monkeypatch.context() as patch:
        patch.setattr(DecodeSteps, "_draw", broken)
        result = execute(config, out=tmp_path, run_name="r", notice=said.append)
    rows = read_run(result.run_dir).rows
    assert rows.groupby("method").status.apply(list).to_dict() == {"gkv": ["nan_logits"] * 5, "h2o": ["ok"] * 8}
    assert rows[rows.method == "gkv"].score.isna().all()
    assert set(rows[rows.method == "gkv"].note) == {"logits were NaN or infinite at step 0"}
    assert (result.done, result.planned, dict(result.failed)) == (13, 16, {"nan_logits": 5})
    assert said == [
        f"{TASK} gkv @32: logits were NaN or infinite in 5 successive rows; the cell ends here (3 rows not run). "
        "Try another number type than float32: --dtype bfloat16. If that does not help, the model's weights may be "
        "damaged."
    ]
    assert dict(execute(config, out=tmp_path, run_name="r", resume=True).failed) == {}
    assert set(read_run(result.run_dir).rows.status) == {"ok"}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_drawn_logit_that_is_no_number_is_reported(value, temperature):
    logits = torch.zeros(2, 300)
    logits[1, 7] = value
    state = State(2, 1, Drawing(Sampling(temperature=temperature)), logits.device)
    assert sampler.next_tokens(logits, state).bad.tolist() == [False, True]


def test_a_model_of_nan_ends_with_exit_code_4_and_one_hint(model, tmp_path, kvbench):
    broken = transformers.AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        broken.lm_head.weight.fill_(float("nan"))
    broken.save_pretrained(tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "model")
    line = f"run --model model --method full --task {TASK} --limit 8 --max-new-tokens 8 --slots 2 --run-name r -q"
    done = kvbench(*line.split(), cwd=tmp_path)
    assert done.code == 4, done.err
    assert done.err.count("--dtype") == 1
    assert (
        "error: 8 of 8 rows have no score (5 nan_logits, 3 not run); 'kvbench run --resume r' tries them again."
        in done.err
    )
    assert read_run(tmp_path / "results" / "r").failed == 5


@pytest.mark.parametrize(
    ("module", "part"),
    [(setup, "make_cache"), (setup, "rules_for"), (loop, "Evictor"), (loop, "PromptReader"), (steps, "step_writer")],
)
def test_an_engine_that_cannot_be_made_with_its_slots_is_made_with_fewer(model, tmp_path, monkeypatch, module, part):
    made, calls = getattr(module, part), []

    def short(*args, **kwargs):
        calls.append(part)
        if len(calls) == 1:
            raise type(CUDA)(*CUDA.args)
        return made(*args, **kwargs)

    monkeypatch.setattr(module, part, short)
    result = execute(small(model), out=tmp_path, run_name="r", notice=lambda text: None)
    assert (result.done, dict(result.failed)) == (8, {})
    assert set(read_run(result.run_dir).rows.slots) == {2}


@pytest.mark.parametrize("error", [CPU, ECC, MemoryError()], ids=["memory", "device", "python"])
def test_a_machine_that_fails_is_not_taken_for_a_model_that_is_not_supported(error):
    with pytest.raises(type(error)), own_failures(object()):
        raise error


@pytest.mark.parametrize(
    "line",
    [
        f"replay --model tiny --method knorm --budget 32 --task {TASK} --limit 1 --max-new-tokens 8 -q",
        "train lookaheadkv --model tiny --steps 1 --samples 2 --batch 1 --out out -q",
        "lm-eval --tasks kvbench_chain --limit 1 --model_args model=tiny,method=tova,budget=32",
    ],
    ids=lambda line: line.split()[0],
)
def test_a_command_that_runs_out_of_memory_ends_with_one_line(line, tmp_path, monkeypatch, capsys):
    def short(*args, **kwargs):
        raise type(CUDA)(*CUDA.args)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(PromptReader, "read", short)
    assert main(line.split()) == 3
    errors = [text for text in capsys.readouterr().err.splitlines() if text.startswith("error: ")]
    assert len(errors) == 1
    assert "memory (CUDA out of memory. Tried to allocate 20.00 MiB.)" in errors[0]
