"""The bench runs and counts right; it asserts nothing about speed."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from kvbench.cli.bench_tables import print_tables
from kvbench.cli.commands.bench import bench as command
from kvbench.config.run_config import MethodChoice
from kvbench.console import faults
from kvbench.console.signals import Signalled
from kvbench.engine.model.random_weights import supply
from kvbench.engine.model.shape import on_meta
from kvbench.engine.plan import Machine, plan_cell
from kvbench.errors import KVBenchError, SetupError, UserError
from kvbench.eviction import choose
from kvbench.registry import methods
from kvbench.runner.bench.results import Cost, as_json, rise
from kvbench.runner.bench.rounds import Contest, NothingFits, bench
from kvbench.runner.bench.setting import Load, Member, Setting, build
from kvbench.runner.bench.shapes import SHAPES
from kvbench.runner.bench.stopwatch import Stopwatch
from kvbench.runner.bench.systems import EngineSystem, Generate, System, systems
from kvbench.runner.bench.vllm_process import vllm_seconds

FULL = Member(MethodChoice(name="full"), None)
TOVA = Member(MethodChoice(name="tova"), 48)
SMALL = Setting(new_tokens=(24,), members=(TOVA,), interval=8, sequences=(2,), repeats=1, prompts=(16,))
LOAD = Load(16, 24, 2)
MACHINE = Machine(bandwidth=1e9, flops=1e9, memory=1 << 34)


@pytest.fixture(scope="module")
def loaded():
    return build(SMALL)


def test_all_systems_are_measured_in_every_round():
    three = (FULL, TOVA._replace(budget=24), TOVA)
    setting = replace(SMALL, members=three, sequences=(1, 2), repeats=2, new_tokens=(12,))
    rounds: list[str] = []
    results = list(bench(setting, rounds.append))
    names = ["full", "tova @24", "tova @48", "transformers"]
    assert setting.names() == names
    assert [(r.load.sequences, r.system) for r in results] == [(n, name) for n in (1, 2) for name in names]
    assert len(rounds) == 2 * 2 * 4
    for row in results:
        assert row.decoded == row.load.sequences
        assert row.failure is None
        assert row.fresh is not None
        assert row.warm is not None
        for speed in (row.fresh, row.warm):
            assert speed.low <= speed.rate <= speed.high
            assert speed.decode is not None
            assert speed.decode > 0
        assert row.first_seconds is not None
        assert row.first_seconds >= 0
        assert (row.entries is None) == (row.system == "transformers")
    document = json.loads(json.dumps(as_json(setting, results)))
    assert document["setting"]["shape"] == "A"
    assert document["rows"][0]["system"] == "full"


def test_what_was_measured_before_a_signal_is_printed(capsys, monkeypatch):
    """The second system's measurement is interrupted: the first one's figures are printed, then the signal goes on."""

    def interrupted(system, *_):
        raise Signalled(signal.SIGINT)

    monkeypatch.setattr(Generate, "run", interrupted)
    monkeypatch.setattr(Contest, "apart", lambda self, work: work())  # a forked process would say no more than "ended"
    typed = {"method": "full", "budget": None, "method_opt": None}
    with pytest.raises(Signalled):
        command(**typed, sequences="1", prompt="16", new_tokens="8", repeats="1", device="cpu", json=True)
    printed = capsys.readouterr().out
    assert [row["system"] for row in json.loads(printed.splitlines()[-1])["rows"]] == ["full"]
    assert any(line.startswith("full ") for line in printed.splitlines())


def test_what_was_measured_is_printed_if_a_signal_comes_while_attention_is_timed(capsys, monkeypatch):
    def interrupted(system, *_):
        raise Signalled(signal.SIGINT)

    monkeypatch.setattr(EngineSystem, "attention", interrupted)
    monkeypatch.setattr(Contest, "apart", lambda self, work: work())
    typed = {"method": "full,tova", "budget": ["12"], "method_opt": None, "baseline": "none"}
    with pytest.raises(Signalled):
        command(**typed, sequences="1", prompt="16", new_tokens="8", repeats="1", device="cpu", json=True)
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["system"] for row in rows] == ["full", "tova @12"]


def test_the_limit_and_the_entries_are_those_of_the_cache_as_it_was(loaded):
    """A cache that is far from full for most of the run must not be compared with the limit of a full one."""
    setting = replace(SMALL, members=(FULL, TOVA), baselines=())
    full, tova = Contest(setting, loaded, print, MACHINE).rows(LOAD)
    steps = range(LOAD.new_tokens)  # the first count is that of the prompt
    assert full.entries == pytest.approx(sum(LOAD.prompt + step for step in steps) / len(steps))
    assert tova.entries == pytest.approx(full.entries)  # 16 + 24 tokens stay below 48
    assert tova.roofline_share is not None
    assert tova.roofline_share > 0


def test_samples_share_a_prompt(loaded):
    setting = replace(SMALL, samples=3)
    ids = setting.ids(16, 4)
    assert ids[0].equal(ids[2])
    assert not ids[0].equal(ids[3])
    system = EngineSystem(setting, loaded, TOVA)
    assert [len(r.samples) for r in system._requests(ids, 2)] == [3, 1]
    assert system.run(ids, 4).sequences == 4


def test_every_method_runs_and_random_weights_are_marked(loaded):
    """All methods, at a budget that makes them evict. Oracles know the future, and speckv needs a draft model."""
    trained = {"duo", "foresightkv", "headkv", "kvzap", "locret", "lookaheadkv", "retention", "triattention", "trimkv"}
    windows = {"kvzap": (("recent", 8),), "lagkv": (("lag", 8), ("sinks", 4)), "vase": (("window", 8),)}
    windows["caote"] = (("window", 8),)
    windows["scope"] = (("base", "snapkv(window=8)"), ("recent", 4))
    windows["pyramidinfer"] = (("window", 8),)
    windows |= dict.fromkeys(("locret", "sepllm"), (("recent", 8),))
    others = {"golden", "speckv"}
    names = [name for name, _ in methods.items() if name not in others]
    choices = [MethodChoice(name=name, options=windows.get(name, ())) for name in names]
    members = tuple(Member(choice, 36 if choice.takes_budget else None) for choice in choices)
    setting = replace(SMALL, members=members, prompts=(40,))
    for system in systems(setting, loaded):
        if isinstance(system, EngineSystem):
            done = system.run(setting.ids(40, 2), 12)
            assert len(done.usages) == 2, system.name
            name = system.name.partition(" ")[0].partition("(")[0]
            assert system.random_weights == (name in trained), system.name
    with pytest.raises(UserError, match="draft"):
        EngineSystem(SMALL, loaded, Member(MethodChoice(name="speckv"), 36))


def test_fewer_sequences_where_memory_ends(loaded):
    class Greedy(System):
        name = "greedy"

        def __init__(self):
            self.asked = []

        def run(self, ids, tokens):
            self.asked.append(len(ids))
            if len(ids) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return Stopwatch(torch.device("cpu")).stop(len(ids), tokens)

    contest = Contest(replace(SMALL, members=(), baselines=()), loaded, print, MACHINE)
    greedy = Greedy()
    first, second = contest._fitting(greedy, LOAD, SMALL.ids(16, 9))
    assert (first.sequences, second.sequences) == (2, 2)
    assert greedy.asked == [9, 4, 2, 2, 2]
    greedy.asked.clear()
    contest._fitting(greedy, LOAD._replace(sequences=None), SMALL.ids(16, 9))
    assert greedy.asked == [9, 7, 6, 5, 4, 3, 2, 2, 2]  # the most that fit
    greedy.run = lambda ids, tokens: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory."))
    assert contest._fitting(greedy, LOAD, SMALL.ids(16, 4)) == NothingFits("CUDA out of memory.")


def test_a_system_that_never_fits_has_a_row_that_says_so(loaded, monkeypatch):
    """The other systems are measured all the same."""

    def fails(self, ids, tokens):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(Generate, "run", fails)
    setting = replace(SMALL, new_tokens=(4,), repeats=2)
    tova, baseline = Contest(setting, loaded, print, MACHINE).rows(Load(16, 4, 2))
    assert tova.decoded == 2
    assert (baseline.decoded, baseline.fresh, baseline.warm) == (0, None, None)
    assert baseline.failure == "out of memory (CUDA out of memory. Tried to allocate 2 GiB)"


def test_as_many_sequences_as_the_plan_of_the_given_memory(loaded):
    """The plan is that of a run on a GPU; what it leaves over is less than another sequence needs."""
    setting = replace(SMALL, members=(FULL, TOVA), new_tokens=(40,), sequences=(None, 3), memory=20 << 20)
    contest = Contest(setting, loaded, print, MACHINE)
    shape, [load, three] = contest.capacity.shape, setting.loads()
    for system in contest.systems:
        method, budget = system.planned
        need = dict(budget=budget, interval=8, max_tokens=56, max_output=40, max_prompt=16, device=torch.device("cuda"))
        need |= dict(sequences=1, dtype=loaded.dtype)
        machine = replace(MACHINE, memory=20 << 20)
        fitting = contest.plans[system.name, load]
        assert plan_cell(shape, machine, method, slots=fitting, **need).slots == fitting
        with pytest.raises(SetupError, match="do not fit"):
            plan_cell(shape, machine, method, slots=fitting + 1, **need)
    rows = list(contest.rows(load))
    assert [row.decoded for row in rows] == [row.fitting for row in rows]
    assert all(0 < row.fitting < 100 for row in rows)
    assert [row.decoded for row in contest.rows(three)] == [min(3, row.fitting) for row in rows]
    none = Contest(replace(setting, memory=1 << 20), loaded, print, MACHINE).rows(load)
    assert [(row.decoded, row.failure) for row in none] == [(0, "out of memory (the plan of 0.000977 GiB)")] * 3


def test_evictions_are_counted_and_timed(loaded):
    """16 + 24 tokens at a budget of 20 and an interval of 8: ticks after 8, 16 and 24 tokens."""
    setting = replace(SMALL, members=(FULL, TOVA._replace(budget=20)), baselines=())
    full, tova = Contest(setting, loaded, print, MACHINE).rows(LOAD)
    assert (full.evictions.count, full.evictions.each) == (0, None)
    assert full.notice is tova.notice is None
    timing = EngineSystem(setting, loaded, setting.members[1]).run(setting.ids(16, 2), 24)
    assert tova.evictions.count == timing.usages[0].evictions
    assert tova.evictions.count == 2  # the answer ends before the third
    assert tova.evictions.each == tova.evictions.seconds / 2 > 0
    assert 0 < tova.evictions.share < 1


def test_a_method_that_evicts_nothing_says_so(loaded, capsys):
    """16 + 24 tokens stay below the budget."""
    kvzap = MethodChoice(name="kvzap", options=(("strategy", "threshold"), ("threshold", -99.0)))
    members = FULL, TOVA, Member(MethodChoice(name="snapkv"), 48), Member(kvzap, None)
    setting = replace(SMALL, members=members, baselines=())
    results = list(Contest(setting, loaded, print, MACHINE).rows(LOAD))
    print_tables(results, ())
    told = [line for line in capsys.readouterr().out.splitlines() if "nothing was evicted" in line]
    rows = as_json(setting, results)["rows"]
    assert told == [f"{row['system']}: {row['notice']}" for row in rows if row["system"] != "full"]
    assert [line.rpartition("Give ")[2] for line in told] == [
        "more --new-tokens, a smaller --interval or a smaller --budget.",
        "a longer --prompt or a smaller --budget.",
        "a longer --prompt or other values of --method-opt.",
    ]


def test_a_program_is_compiled_before_the_clock_starts(loaded, monkeypatch):
    """The compiler is replaced by the recorded operations themselves, which takes no time to compile."""
    compiled = []
    unchanged = lambda module, examples, options: compiled.append(module) or module  # noqa: E731
    monkeypatch.setattr("kvbench.engine.program._inductor.compile", unchanged)
    setting = replace(SMALL, new_tokens=(60,), compile_cpu=True)  # longer than a warm-up
    system = EngineSystem(setting, loaded, TOVA)
    ids = setting.ids(16, 2)
    system.warm_up(ids, 60)
    assert len(compiled) == 1
    assert {usage.decoding for _ in range(2) for usage in system.run(ids, 60).usages} == {"torch compiled"}
    assert len(compiled) == 1


def test_the_first_token_is_reckoned_back_from_the_first_step(monkeypatch):
    times = iter([10.0, 17.0, 29.0])  # began, first step (3 tokens each), stop
    monkeypatch.setattr("kvbench.runner.bench.stopwatch.clock", lambda device: next(times))
    watch = Stopwatch(torch.device("cpu"))
    watch.lap(3)
    watch.lap(4)  # only the first counts
    sample = watch.stop(sequences=2, tokens=9)
    assert sample.first == pytest.approx(7 - 2 * 12 / 6)
    assert sample.rate == pytest.approx(2 * 9 / 19)
    assert sample.decode_rate == pytest.approx(2 * 8 / 16)


def test_stretches_end_at_the_first_lap_past_them(monkeypatch):
    times = iter([10.0, 11.0, 11.0, 15.0, 21.0, 30.0])  # began, first lap and its mark, two marks, stop
    monkeypatch.setattr("kvbench.runner.bench.stopwatch.clock", lambda device: next(times))
    watch = Stopwatch(torch.device("cpu"), stretch=4)
    for tokens in (2, 3, 6, 7, 9, 10):  # a GPU reports several steps at once
        watch.lap(tokens)
    assert watch.stop(sequences=2, tokens=11).costs == pytest.approx((4 / 4 / 2, 6 / 3 / 2))


def test_every_system_is_measured_in_stretches(loaded):
    setting = replace(SMALL, stretch=8)
    for row in Contest(setting, loaded, print, MACHINE).rows(LOAD):
        for speed in (row.fresh, row.warm):
            assert [cost.tokens for cost in speed.costs] == [8, 16, 24]
            assert all(0 < cost.low <= cost.us <= cost.high for cost in speed.costs)
            assert speed.rise == rise(speed.costs)


def test_a_rise_is_that_of_the_cheapest_rounds_without_the_first_stretch():
    def costs(*lows):
        return [Cost(tokens=100 * i, us=low + i % 2, low=low, high=90) for i, low in enumerate(lows, 1)]

    assert rise(costs(1, 20, 20, 20)) == pytest.approx(0)
    assert rise(costs(70, 19, 20, 21)) == pytest.approx(0.1)
    assert rise(costs(5, 6)) is None


def test_generate_has_its_first_lap_after_one_token(loaded):
    sample = Generate(SMALL, loaded).run(SMALL.ids(16, 2), 6)
    assert sample.first is not None
    assert 0 < sample.first < sample.seconds


def test_continuous_batching_makes_every_token(loaded):
    pytest.importorskip("psutil", reason="transformers' continuous batching needs psutil on a CPU")
    setting = replace(SMALL, members=(), baselines=("continuous",), new_tokens=(6,))
    [row] = Contest(setting, loaded, print, MACHINE).rows(Load(16, 6, 2))
    assert row.system == "continuous"
    assert row.warm.rate > 0
    assert row.first_seconds is None


FAKE_VLLM = """
class SamplingParams:
    def __init__(self, max_tokens, **more): self.tokens = max_tokens
class Answer:
    def __init__(self, tokens): self.outputs = [self]; self.token_ids = [1] * tokens
class LLM:
    def __init__(self, model, **more):
        print("vLLM speaks on stdout")
        if more["max_num_seqs"] > 2: raise RuntimeError("CUDA out of memory.")
    def generate(self, prompts, params, use_tqdm): return [Answer(params.tokens) for p in prompts]
"""


def test_vllm_runs_in_a_process_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(p for p in sys.path if p)}")
    assert vllm_seconds(tmp_path, SMALL.ids(16, 2), 6, "float32") >= 0
    with pytest.raises(RuntimeError, match="out of memory") as error:
        vllm_seconds(tmp_path, SMALL.ids(16, 3), 6, "float32")
    assert faults.out_of_memory(error.value)  # so that bench tries fewer sequences
    (tmp_path / "vllm.py").write_text("raise SystemExit(3)")
    (tmp_path / "kvbench-result.json").unlink()
    with pytest.raises(KVBenchError, match="ended without a result"):
        vllm_seconds(tmp_path, SMALL.ids(16, 2), 6, "float32")


def test_what_a_measuring_process_raises_reaches_the_user(loaded):
    contest = Contest(replace(SMALL, members=(), baselines=()), loaded, print, MACHINE)

    def refuse():
        raise UserError("this cannot be served.")

    with pytest.raises(UserError, match="cannot be served"):
        contest.apart(refuse)
    with pytest.raises(SetupError, match=r"out of memory \(CUDA out of memory\.\)\. Use fewer --sequences"):
        contest.apart(lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA out of memory.")))
    with pytest.raises(KVBenchError, match="exit code -9"):
        contest.apart(lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_a_file_name_of_random_weights_fits_a_large_model(loaded, tmp_path):
    config = transformers.AutoConfig.for_model("qwen3", **{**SHAPES["qwen3-4b"][1], "hidden_size": 64, "head_dim": 8})
    model = replace(loaded, model=on_meta(config))
    method, _ = supply(choose.make("lookaheadkv", {}), model, tmp_path)
    assert Path(method.weights().path).is_file()
