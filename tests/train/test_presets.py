"""Every preset trains two steps of the built-in model, with shorter texts; cards name the preset and what it sets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.recipes import change, options_of

from kvbench import tiny
from kvbench.cli.app import main
from kvbench.taskkit.synthetic.problem import HELD_OUT
from kvbench.taskkit.synthetic.variants import VARIANTS
from kvbench.train import traces
from kvbench.train.catalogue import BUILT_IN
from kvbench.train.collection import Collection
from kvbench.train.loop import LOG
from kvbench.train.prepare import prepare

# What makes the papers' trainings short. Settings that do not stand here are the preset's.
SCORER = ["min_tokens=1", "unfinished=keep", "max_tokens=60", "budget=24", "interval=8"]
OWN_CACHE = ["max_tokens=48", "budget=64", "interval=16"]
SHORT = {
    "lookaheadkv": ["rows=2", "rank=2", "max_tokens=12"],
    "trimkv": ["width=4", "max_tokens=24", "budget=8", "interval=8"],
    "retention": ["width=4", "max_tokens=24", "budget=8", "interval=8"],
    "locret": ["width=4", "tokens=40", "max_tokens=24"],
    "kvzap": ["width=4", "tokens=40", "max_tokens=24"],
    "duo": ["sinks=4", "recent=32"],
    "foresightkv": SCORER,
    "foresightkv-grpo": [*SCORER, "long=190", "long_budget=32", "long_interval=16", "group=2"],
    "gkv-distill": [*OWN_CACHE, "truncate=40", "unfinished=keep"],
    "gkv-rl": [*OWN_CACHE, "group=2", "temperature=2"],  # at 0.6 both answers of a group are equal: no gradient
}
PAPER = [(name, preset) for name, entry in BUILT_IN.items() for preset in entry.presets if preset != "tiny"]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Questions of two lengths for the built-in model; every second answer of each is right."""
    count = iter(range(10**6))
    monkeypatch.setattr(traces, "judge", lambda *known: lambda text: next(count) % 2 == 0)
    kinds = ("lookup-8", "orbit-100")  # prompts of 166 and 46 tokens
    rows = [{"question": VARIANTS[kinds[i % 2]].generate(HELD_OUT + i).prompt} for i in range(12)]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row | {"answer": "1"}) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(("name", "preset"), PAPER)
def test_two_steps_of_every_preset(name, preset, data, tmp_path, monkeypatch, capsys):
    change(monkeypatch, name, held_out=2)
    out = tmp_path / "out"
    options = [word for text in SHORT[name] for word in ("--opt", text)]
    if name == "foresightkv-grpo":
        options += ["--opt", f"init={tiny.path()}"]
    if name != "duo":
        options += ["--data", str(data)]
    command = ["train", name, "--preset", preset, *options, "--samples", "8", "--steps", "2", "--batch", "2"]
    assert main([*command, "--out", str(out), "--json", "-q"]) == 0, capsys.readouterr().err
    made = json.loads(capsys.readouterr().out.splitlines()[-1])["made"]
    rows = [json.loads(line) for line in (out / LOG).read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["grad_norm"] > 0
    given = {text.partition("=")[0] for text in SHORT[name]} | {"samples", "steps", "batch", "init"}
    values = made["settings"] | made["settings"]["more"]
    wanted = {key: v for key, v in BUILT_IN[name].presets[preset].of("tiny").items() if key not in given}
    assert {key: values.get(key) for key in wanted} == wanted
    assert values["preset"] == preset
    assert f" --preset {preset} " in made["command"]


def test_answers_are_sampled_at_the_temperature_of_the_paper():
    """Where a paper and its released script differ, a preset takes the paper's value."""
    assert BUILT_IN["gkv-rl"].presets["paper"].values["temperature"] == 0.6


def test_lookaheadkv_draws_as_many_answers_as_it_asks_for():
    settings = BUILT_IN["lookaheadkv"].settings("m", "paper")
    assert settings["steps"] * settings["batch"] == settings["samples"]


def test_both_stages_of_foresightkv_share_their_answers():
    first, second = (BUILT_IN[name].settings("m", "paper") for name in ("foresightkv", "foresightkv-grpo"))
    assert first["samples"] == second["samples"]
    assert Collection.of(first) == Collection.of(second)


def test_a_trace_beyond_a_length_has_its_own_budget(data, tmp_path, monkeypatch):
    change(monkeypatch, "foresightkv", held_out=2)
    own = {"budget": 24, "interval": 8, "long_budget": 32, "long_interval": 16, "max_tokens": 60, "wrong": "keep"}
    options = options_of(BUILT_IN["foresightkv"]) | own | {"long": 150}
    numbers = {"samples": 8, "steps": 1, "lr": 1e-3, "batch": 2, "seed": 0}
    ready = prepare(
        "foresightkv", str(tiny.path()), data=str(data), options=options, device="cpu", out=tmp_path, **numbers
    )
    recipe = ready.recipe
    lengths = [len(trace.ids) for trace in recipe.traces]
    assert min(lengths) <= 150 < max(lengths)
    for trace in recipe.traces:
        long = len(trace.ids) > 150
        assert recipe.evictions_of(trace).budget == (32 if long else 24)
        first = recipe._choices(trace)[0]
        assert first.dropped[0, 0].sum() <= (16 if long else 8) or first.seen == len(trace.prompt)
        assert (first.seen - len(trace.prompt)) % (16 if long else 8) == 0
    assert recipe.card()["recent"] == 6
    assert recipe.card()["long_recent"] == 8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["foresightkv", "--preset", "paper"],
            "--preset paper with prompt_style=foresightkv needs questions from a file; give --data FILE.",
        ),
        (["headkv", "--preset", "paper"], "headkv is estimated, not trained; it takes no --preset."),
        (["triattention", "--batch", "4"], "triattention is estimated, not trained; it takes no --batch."),
        (["duo", "--preset", "papr"], "the recipe has no preset 'papr'. Did you mean 'paper'? There are tiny, paper."),
    ],
)
def test_mistakes(words, message, tmp_path, capsys):
    assert main(["train", *words, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


def test_the_command_says_which_preset_and_whether_it_knows_the_model(data, tmp_path, monkeypatch, capsys):
    change(monkeypatch, "foresightkv-grpo", held_out=2)
    options = [word for text in SHORT["foresightkv-grpo"] for word in ("--opt", text)]
    command = ["train", "foresightkv-grpo", "--preset", "paper", "--data", str(data), *options, "--samples", "8"]
    command += ["--steps", "1", "--batch", "1", "--opt", f"init={tiny.path()}", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    err = capsys.readouterr().err
    assert "preset paper: answers as for foresightkv; budget 1024 and interval 256 up to 12,000 tokens" in err
    assert (
        "preset paper has values for Qwen3-4B, Qwen3-1.7B, DeepSeek-R1-Distill-Qwen-7B, none for tiny; kl=0.01" in err
    )
