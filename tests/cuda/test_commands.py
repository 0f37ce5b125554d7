"""Every command with a device runs its CUDA code on the pretended device, with the results of the CPU.

Training runs one step, whose gradients are zeros there: it shows devices and synchronisations, not learning.
"""

from __future__ import annotations

import json
import shlex

import pytest
import torch
from support.pretend_cuda import pretended_cuda
from support.recipes import change

from kvbench.cli.app import main
from kvbench.engine.graph import StepGraph
from kvbench.store import read_run

FEW = "--model tiny --task walk/orbit-100 --limit 2 --budget 32 --interval 8 --dtype float32"


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """command("run ... --device cuda"): the exit code is 0; the last line of stdout."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVBENCH_NO_PROGRESS", "1")

    def run(line):
        try:
            code = main(shlex.split(line))
        except SystemExit as leaving:
            code = leaving.code
        printed = capsys.readouterr()
        assert not code, printed.err
        return (printed.out.strip().splitlines() or [""])[-1]

    return run


@pytest.mark.parametrize("methods", ["full,gkv,snapkv-decode", "h2o,kvzip,retention"])
def test_run_gives_the_rows_of_the_cpu(command, tmp_path, methods):
    line = f"run --method {methods} {FEW} --samples 2 --temperature 1 --slots 2 --max-new-tokens 20 -q"  # with refills
    command(f"{line} --device cpu --run-name cpu")
    with pretended_cuda() as device:
        steps = device.watch(StepGraph, "replay")
        command(f"{line} --device cuda --run-name cuda")
    assert len(steps) > 20
    cpu, cuda = (read_run(tmp_path / "results" / name).rows.sort_values("row_key") for name in ("cpu", "cuda"))
    assert list(cuda.output_sha256) == list(cpu.output_sha256)
    assert set(cuda.status) == {"ok"}
    assert set(cuda.device) == {"pretended"}
    for column in ("score", "entries_peak", "kv_bytes_peak", "evictions"):
        assert cuda[column].fillna(-1).tolist() == cpu[column].fillna(-1).tolist(), column
    assert cpu.device_bytes_peak.isna().all()
    assert (cuda.kv_bytes_peak < cuda.device_bytes_peak).all()


def test_a_model_divided_among_gpus_gives_the_rows_of_the_cpu(command, tmp_path):
    line = f"run --method gkv,retention {FEW} --slots 2 --max-new-tokens 12 --decode-attn torch -q"
    command(f"{line} --device cpu --run-name cpu")
    with pretended_cuda(devices=2) as device:
        command(f"{line} --device-map auto --run-name both")
        assert all(each.peak for each in device.memories)
    cpu, both = (read_run(tmp_path / "results" / name).rows.sort_values("row_key") for name in ("cpu", "both"))
    assert list(both.output_sha256) == list(cpu.output_sha256)
    assert set(both.device) == {"2 x pretended"}
    assert set(both.decoding) == {"torch"}
    assert (both.device_bytes_peak < sum(each.peak for each in device.memories)).all()  # of the fuller one


def test_a_model_is_divided_among_gpus_only(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(f"run --method gkv {FEW} --device-map auto")) == 3
    assert "--device-map auto divides a model among GPUs; this run uses no GPU." in capsys.readouterr().err
    assert main(shlex.split(f"run --method gkv {FEW} --device-map auto --workers 2")) == 2
    assert "with --device-map auto one process uses all GPUs." in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_replay_gives_the_losses_of_the_cpu(command):
    line = f"replay --method knorm,h2o {FEW} --max-new-tokens 24 -q --json"
    cpu = json.loads(command(f"{line} --device cpu"))
    with pretended_cuda():
        cuda = json.loads(command(f"{line} --device cuda"))
    numbers = [x for x in _leaves(cpu) if isinstance(x, float)]
    assert len(numbers) > 10
    assert [x for x in _leaves(cuda) if isinstance(x, float)] == pytest.approx(numbers, rel=1e-4, abs=1e-5)


def _leaves(value):
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in _leaves(value[key])]
    if isinstance(value, list):
        return [leaf for each in value for leaf in _leaves(each)]
    return [value]


def test_bench_measures_engine_and_baseline(command):
    line = (
        "bench --device cuda --sequences 2 --new-tokens 12 --budget 24 --interval 8 --repeats 1 --dtype float32 --json"
    )
    with pretended_cuda() as device:
        document = json.loads(command(line))
    assert document["device"] == "pretended"
    assert device.launches > 500


@pytest.mark.parametrize("recipe", ["lookaheadkv", "trimkv"])
def test_a_step_of_training(command, tmp_path, monkeypatch, recipe):
    change(monkeypatch, recipe, held_out=1)
    few = "--steps 1 --samples 4 --batch 1 --opt max_tokens=64"
    with pretended_cuda() as device:
        command(f"train {recipe} --model tiny {few} --device cuda --out out -q")
    assert (tmp_path / "out" / f"{recipe}.safetensors").exists()
    assert device.launches > 500


def test_the_cache_for_generate():
    from support.models import build

    from kvbench import EvictionCache

    ids = torch.arange(2, 62).view(2, 30)

    def generated(model, **more):
        cache = EvictionCache(model, method="gkv", budget=20, interval=4, max_tokens=64)
        settings = dict(max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)
        return model.generate(ids.to(model.device), past_key_values=cache, **settings, **more).tolist()

    want = generated(build("qwen3").model)
    with pretended_cuda():
        assert generated(build("qwen3").model.to("cuda")) == want


def test_lm_eval(command):
    from lm_eval.api.instance import Instance

    from kvbench.integrations.lm_eval import KVBenchLM

    how = {"until": [], "max_gen_toks": 10, "do_sample": False}

    def answers(device):
        model = KVBenchLM(model="tiny", method="tova", budget=16, interval=4, device=device, dtype="float32")
        text = [Instance("generate_until", {}, ("# Facts: cod 31, bow 46,\nAsk: cod?\nThink:", how), 0)]
        scored = [Instance("loglikelihood", {}, ("# Facts: cod 31,", " bow 46"), 0)]
        return model.generate_until(text, disable_tqdm=True), model.loglikelihood(scored, disable_tqdm=True)

    (text,), ((score, greedy),) = answers("cpu")
    with pretended_cuda():
        (cuda_text,), ((cuda_score, cuda_greedy),) = answers("cuda")
    assert (cuda_text, cuda_greedy) == (text, greedy)
    assert cuda_score == pytest.approx(score, abs=1e-4)
