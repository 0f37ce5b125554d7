"""The memory plan of a training: what it counts is what the CPU's allocator is asked for, and what it says of it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import transformers
from support import training_memory, training_plans
from support.recipes import change

from kvbench.cli.app import main
from kvbench.errors import UserError
from kvbench.train import catalogue, lora, memory
from kvbench.train.memory import MOMENTS, STEP, UPDATE, Rehearsal
from kvbench.train.plan import Device, TrainingPlan
from kvbench.train.rehearsal import Parts, Segment

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "training"
_OWN_CACHE = {"max_prompt": 40, "max_tokens": 200, "budget": 64, "interval": 64}
_EXPERTS = {"kind": transformers.Qwen3MoeConfig, "num_experts": 8, "num_experts_per_tok": 2}
_EXPERTS |= {"moe_intermediate_size": 128}
CASES = {
    "lookaheadkv": ("lookaheadkv", {"max_prompt": 300, "max_tokens": 60}),
    "lookaheadkv experts": ("lookaheadkv", {"max_prompt": 300, "max_tokens": 60}),
    "duo": ("duo", {"tokens": 300, "sinks": 8, "recent": 32}),
    "trimkv": ("trimkv", {"max_prompt": 40, "max_tokens": 200, "budget": 64, "interval": 64}),
    "gkv-distill": ("gkv-distill", _OWN_CACHE),
    "gkv-distill bfloat16 lora": ("gkv-distill", _OWN_CACHE | {"precision": "bfloat16", "lora": 4}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_plan_counts_what_the_allocator_measures(case):
    name, changes = CASES[case]
    sizes = {"vocab_size": 1024} | (_EXPERTS if "experts" in case else {})
    planned = training_memory.plan(name, training_memory.config(4, **sizes), **changes)
    assert not planned.uncounted
    counted = {phase.name: phase.bytes for phase in planned.phases}
    measured = training_memory.measured(planned)
    assert STEP in measured
    for phase, size in measured.items():
        assert counted[phase] == pytest.approx(size, rel=0.1), phase


def test_the_steps_of_a_model_that_loops_over_its_experts_are_not_counted():
    sizes = {"intermediate_size": 64, "moe_num_experts": 4, "moe_topk": 2}
    planned = training_memory.plan("duo", training_memory.config(2, transformers.AriaTextConfig, **sizes), tokens=100)
    assert "one expert after another" in planned.uncounted
    assert planned.fits is None


_SMALL = {"max_prompt": 40, "max_tokens": 60, "truncate": 0, "tokens": 100, "batch": 2, "samples": 2, "seed": 0}
_SMALL |= {"budget": 48, "interval": 16, "group": 2, "width": 8, "sinks": 4, "recent": 16}


@pytest.mark.parametrize("name", catalogue.BUILT_IN)
def test_the_steps_of_every_recipe_are_counted_for_a_gpu(name, monkeypatch):
    """Prompts on a GPU have a mask that torch cannot make while a rehearsal watches."""
    change(monkeypatch, name, held_out=2)
    settings = catalogue.entry_of(name).settings("model", None)
    settings |= {option: value for option, value in _SMALL.items() if option in settings or option == "seed"}
    plan = TrainingPlan.of(name, training_memory.config(2), settings, Device(gpu=True, total=10**10))
    assert plan.uncounted == ""
    assert plan.fits
    assert STEP in [phase.name for phase in plan.phases]
    texts = 4 if name == "gkv-rl" else 2  # 2 questions with 2 answers each
    before = {"duo": 0, "gkv-rl": 0, "gkv-distill": 2 * 60}.get(name, (2 + 2) * 60)  # also of held-out questions
    assert plan.tokens == {
        "step": texts * 100,
        "all_steps": settings["steps"] * texts * 100,
        "generated_before": before,
        "generated_in_steps": settings["steps"] * texts * 60 if name == "gkv-rl" else 0,
    }


def test_answers_to_held_out_questions_are_as_long_as_max_tokens():
    changes = _OWN_CACHE | {"truncate": 20}
    planned = training_memory.plan("gkv-distill", training_memory.config(2), **changes)
    assert (planned.items[0].ids, planned.answer) == ((0,) * 60, 20)
    assert [(len(q.ids), q.max_new_tokens) for q in planned.held_out] == [(40, 200)] * 2


@pytest.fixture
def folder(tmp_path):
    """A model's folder with its configuration and no weights."""
    training_memory.config(3).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_processes_share_the_moments():
    config = training_memory.config(3)
    short = {"max_prompt": 40, "max_tokens": 40, "budget": 64, "interval": 32}
    one, two = (
        training_memory.plan("gkv-rl", config, Device(gpu=True, total=10**9, processes=count), **short).phases
        for count in (1, 2)
    )
    halves = [phase.parts[MOMENTS] for phase in one if phase.name == UPDATE]
    assert [phase.parts[MOMENTS] * 2 for phase in two if phase.name == UPDATE] == halves > [0]


def dry_run(folder, memory, capsys, recompute):
    """Return the last line that the command prints, and its JSON document."""
    opts = {"max_prompt": 40, "max_tokens": 200, "budget": 64, "interval": 32, "recompute": recompute}
    argv = ["train", "gkv-rl", "--model", folder, "--batch", "2", "--dry-run", "--json", "--gpu-memory", memory]
    assert main(argv + [word for name, value in opts.items() for word in ("--opt", f"{name}={value}")]) == 0
    *_, text, document = capsys.readouterr().out.splitlines()
    return text, json.loads(document)


def test_the_command_plans_without_weights_and_says_what_fits(folder, capsys):
    text, held = dry_run(folder, "80GB", capsys, "off")
    assert text.endswith("fits into 80.00 GB.")
    assert held["fits"]
    assert held["tokens"]["step"] == 2 * 8 * 240
    recomputed = dry_run(folder, "80GB", capsys, "on")[1]["peak_bytes"]
    assert recomputed < held["peak_bytes"]

    between = f"{(recomputed + held['peak_bytes']) / 2 / 10**9:.9f}GB"
    text, document = dry_run(folder, between, capsys, "off")
    assert "does not fit" in text
    assert "with --opt recompute=on" in text
    assert document["fits_with"] == {"recompute": "on"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--dry-run", "--gpu-memory", "80"], "80GB"),
        (["--dry-run", "--gpu-memory", "9" * 400 + "GB"], "80GB"),
        (["--dry-run", "--processes", "0"], "--processes"),
        (["--dry-run", "--processes", "3"], "a batch of 8 cannot be shared equally by 3 processes"),
        (["--gpu-memory", "80GB", "--out", "x"], "Give --dry-run too"),
        (["--processes", "2", "--out", "x"], "torchrun"),
        ([], "--out is missing"),
    ],
)
def test_wrong_flags_of_a_plan(argv, message, capsys):
    assert main(["train", "duo", "--model", "tiny", *argv]) == 2
    assert message in capsys.readouterr().err


def test_a_plan_without_counts_says_so(folder, capsys, monkeypatch):
    """A recipe's code may need values, which tensors without memory lack."""

    def fail(self):
        raise RuntimeError("it reads values")

    monkeypatch.setattr(Rehearsal, "phases", fail)
    argv = ["train", "gkv-rl", "--model", folder, "--batch", "2", "--dry-run", "--opt", "max_tokens=20"]
    argv += ["--gpu-memory", "80GB", "--json"]
    assert main([*argv, "--opt", "budget=64", "--opt", "interval=32"]) == 0
    printed = capsys.readouterr()
    assert "could not be counted: it reads values" in " ".join(printed.err.split())
    *_, text, document = printed.out.splitlines()
    assert text.startswith("Unknown whether it fits into 80.00 GB: the memory of its steps is not counted.")
    assert json.loads(document)["fits"] is None


def layered(folder, layers):
    """The configuration of the folder's model with so many layers."""
    config = transformers.AutoConfig.from_pretrained(folder)
    config.num_hidden_layers, config.layer_types = layers, config.layer_types[:1] * layers
    return config


def test_parts_that_do_not_grow_evenly_are_not_continued_to_all_layers(folder, monkeypatch):
    """Two rehearsals whose peaks lie at different places would give a number that means nothing."""

    def shrunk(few, more, layers):
        return [Segment("", [Parts({"logits": -100, "weights": 1000})])]

    monkeypatch.setattr(memory, "_extended", shrunk)
    settings = catalogue.entry_of("duo").settings("m", "tiny") | {"seed": 0, "tokens": 100}
    plan = TrainingPlan.of("duo", layered(folder, 8), settings, Device(gpu=True, total=10**9))
    assert "does not grow linearly with the number of layers" in plan.uncounted
    assert not plan.fits


def test_windows_in_every_layer_are_planned_with_texts_that_fit(tmp_path, capsys):
    """How long the real texts are is not known yet; the training refuses longer ones."""
    config = transformers.MistralConfig(num_hidden_layers=2, sliding_window=300, **training_memory.SIZES)
    config.save_pretrained(tmp_path / "model")
    argv = ["train", "lookaheadkv", "--model", str(tmp_path / "model"), "--dry-run", "--json", "--gpu-memory", "80GB"]
    assert main([*argv, "--opt", "max_tokens=400"]) == 0
    *printed, document = capsys.readouterr().out.splitlines()
    assert "assumed: each text fits into a sliding window, 300 tokens" in "\n".join(printed)
    planned = json.loads(document)
    assert planned["prompt"] + planned["answer"] == 300
    assert not planned["not_counted"]


def test_a_suggestion_that_the_recipe_refuses_is_left_out(folder, monkeypatch):
    def refuse(model, method, more):
        if more["lora"]:
            raise UserError("not with this model")

    monkeypatch.setattr(lora, "check", refuse)
    settings = catalogue.entry_of("gkv-rl").settings("m", None) | {"batch": 2, "seed": 0, "max_tokens": 20}
    plan = TrainingPlan.make("gkv-rl", folder, settings, Device(gpu=True, total=10**6))
    assert "lora" not in plan.smaller()[0]


def test_the_precision_is_checked_before_the_model_is_loaded():
    with pytest.raises(UserError, match=r"^--opt precision must be float32 or bfloat16; got 'foo'\.$"):
        catalogue.entry_of("gkv-rl").dtype_for({"precision": "foo"})


def test_the_tables_in_docs_are_those_of_their_files():
    docs = (ROOT / "docs" / "training.md").read_text()
    with (RESULTS / "plans.csv").open() as file:
        assert "\n".join(training_plans.markdown(csv.DictReader(file))) in docs
    with (RESULTS / "memory.csv").open() as file:
        assert "\n".join(training_memory.markdown(csv.DictReader(file))) in docs
