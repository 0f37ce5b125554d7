"""The second stage of foresightkv: rewards, advantages and the policy's loss by hand; draws are the method's own."""

from __future__ import annotations

import dataclasses
import json
import math
import weakref
from pathlib import Path

import pytest
import torch
from kvbench.methods.foresightkv import ForesightKV
from support import models
from support.models import VOCABULARY, build

from kvbench import tiny
from kvbench.cli.app import main
from kvbench.config.run_config import MethodChoice
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import load
from kvbench.engine.model.weights import Base, save_weights
from kvbench.errors import UserError
from kvbench.eviction.terms.foresight import drop_scores, scorer_shapes
from kvbench.eviction.terms.objectives import advantages, chosen_log_probs, policy_loss
from kvbench.records import Request
from kvbench.replay.batches import replay
from kvbench.replay.choices import Chosen
from kvbench.replay.traces import ForcedTrace
from kvbench.train.loop import train
from kvbench.train.policy_gradient import PolicyGradient
from kvbench.train.recipe import Settings
from kvbench.train.recipes.foresightkv_grpo import PolicyRecipe, rewards
from kvbench.train.traces import Trace, built_in, collect

MORE = {
    "budget": 24,
    "interval": 8,
    "features": "paper6",
    "group": 4,
    "reward": "all",
    "clip": 0.2,
    "kl": 0.01,
}
SETTINGS = Settings(steps=6, lr=3e-3, warmup=1, batch=2, more=MORE)


def random_traces(count, prompt=40, answer=30, seed=5):
    generator = torch.Generator().manual_seed(seed)

    def tokens(length):
        return tuple(torch.randint(0, VOCABULARY, (length,), generator=generator).tolist())

    return [Trace(name=f"t{i}", prompt=tokens(prompt), answer=tokens(answer)) for i in range(count)]


def scorer_file(loaded, folder: Path, seed=0, **made):
    """A random scorer for a model, with differences of about 1 between entries."""
    g = loaded.geometry[0]
    sizes = {"num_hidden_layers": len(loaded.geometry), "num_key_value_heads": g.kv_heads, "head_dim": g.head_dim,
             "num_attention_heads": g.query_heads}  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: 0.3 * torch.randn(shape, generator=generator) for name, shape in scorer_shapes("paper6", sizes).items()
    }
    path = folder / "foresightkv.safetensors"
    base = Base(name="m", config=loaded.model.config)
    save_weights(path, "foresightkv", tensors, base, made={"command": "kvbench train this", **made})
    return path


def recipe_of(loaded, folder, **changes):
    more = MORE | {"init": str(scorer_file(loaded, folder))} | changes
    settings = dataclasses.replace(SETTINGS, more=more)
    return PolicyRecipe(loaded, settings, random_traces(4), random_traces(2, seed=6))


# by hand


def test_advantages_by_hand():
    got = advantages(torch.tensor([1.0, 2.0, 3.0, 6.0]))
    deviation = math.sqrt((4 + 1 + 0 + 9) / 4)  # of the population
    torch.testing.assert_close(got, torch.tensor([-2.0, -1.0, 0.0, 3.0]) / deviation)
    assert advantages(torch.full((3,), -0.25)).tolist() == [0, 0, 0]  # draws that are equally good teach nothing


def test_rewards_by_hand():
    """Five tokens, the third of most entropy: 80% low are the other four."""
    entropy = torch.tensor([0.1, 0.2, 0.9, 0.3, 0.0])
    added = torch.tensor([[0.0, 2.0, 5.0, 1.0, 3.0], [1.5, -1.0, 0.0, 0.0, 0.0]])
    wanted = {
        "all": [-11 / 5, -0.5 / 5],
        "low": [-6 / 4, -0.5 / 4],
        "high": [-5.0, 0.0],
        "large": [-(2 + 3) / 4, 0.0],  # 1.5 is not above 1.5
        "squared": [-(4 + 9) / 4, 0.0],
    }
    for kind, values in wanted.items():
        assert rewards(added, entropy, kind).tolist() == pytest.approx(values)
    assert rewards(added[:, :1], entropy[:1], "high").tolist() == [0, 0]  # one token is a low one


def test_log_probs_are_gathered_as_in_a_loop():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3, 7, generator=generator)
    gone = torch.zeros(2, 3, 7, dtype=torch.bool)
    for row in gone.view(-1, 7):
        row[torch.randperm(7, generator=generator)[:3]] = True
    wanted = []
    for b in range(2):
        for h in range(3):
            norm = math.log(sum(math.exp(s) for s in scores[b, h].tolist()))
            wanted += [float(scores[b, h, j]) - norm for j in range(7) if gone[b, h, j]]
    assert chosen_log_probs(scores, gone).tolist() == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "pulls"),
    [(1.0, 1.0, True), (1.3, 1.0, False), (1.3, -1.0, True), (0.7, -1.0, False), (0.7, 1.0, True)],
)
def test_no_gradient_outside_the_clip(ratio, advantage, pulls):
    now = torch.tensor([math.log(0.2 * ratio)], requires_grad=True)
    before = torch.tensor([math.log(0.2)])
    loss, _ = policy_loss(now, before, before, torch.tensor([advantage]), clip=0.2, kl_weight=0.0)
    loss.backward()
    assert float(now.grad) == pytest.approx(-ratio * advantage if pulls else 0.0, rel=1e-4)


# the recipe


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_draws_are_those_of_the_engine(name, tmp_path: Path):
    """The same random numbers give the same losses as generation with the method and its file of weights."""
    loaded = build(name)
    recipe = recipe_of(loaded, tmp_path)
    trace = recipe.traces[0]
    reading = recipe.evictions.drawn(trace, [3, 8], recipe.trained.scorer())
    method = ForesightKV(scorer=str(tmp_path / "foresightkv.safetensors"))
    for row, seed in enumerate((3, 8)):
        engine = Engine(loaded, method, budget=24, interval=8, slots=1, max_tokens=80)
        [answer] = engine.generate([trace.forced(seed).request])
        wanted = -torch.tensor(answer.log_probs, dtype=torch.float64)
        torch.testing.assert_close(reading.losses[row], wanted, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(reading.losses[0], reading.losses[1], atol=1e-2)  # draws differ
    assert not torch.equal(reading.choices[0].dropped[0], reading.choices[0].dropped[1])  # the prompt's too


def test_the_loss_is_that_of_the_definition(tmp_path: Path):
    recipe = recipe_of(build("llama"), tmp_path, kl=0.3)
    with torch.no_grad():  # away from the reference, so that the divergence counts
        recipe.parameters()["w2"].mul_(1.3)
    wanted = []
    for number, trace in enumerate(recipe.batch(5, slice(0, 2))):
        seeds = [(1 + 2 * 5 + number) * 4 + i for i in range(4)]
        reading = recipe.evictions.drawn(trace, seeds, recipe.trained.scorer())
        full = recipe.evictions.full(trace)
        added = (reading.losses - full.losses)[:, 1:]  # the prompt is evicted before the second token
        gains = advantages(-added.mean(dim=1))
        scorer, terms = recipe.trained.scorer(), []
        for choice in reading.choices:
            phi, start = (drop_scores(s, choice.layer, choice.x) for s in (scorer, recipe.before))
            for g in range(4):
                for head in range(2):
                    gone = choice.dropped[g, head]
                    now = phi[g, head].log_softmax(-1)[gone]
                    gap = start[g, head].log_softmax(-1)[gone] - now
                    terms.append(0.3 * (gap.exp() - gap - 1) - gains[g] * (now - now.detach()).exp())
        wanted.append(torch.cat(terms).mean())
    torch.stack(wanted).mean().backward()
    slopes = {name: p.grad.clone() for name, p in recipe.parameters().items()}
    for p in recipe.parameters().values():
        p.grad = None
    loss, figures = recipe.loss(5, slice(0, 2))
    loss.backward()
    torch.testing.assert_close(loss, torch.stack(wanted).mean(), rtol=1e-4, atol=1e-5)
    for name, p in recipe.parameters().items():
        torch.testing.assert_close(p.grad, slopes[name], rtol=1e-3, atol=1e-5)
    assert figures["kl"] > 0
    again, halves = recipe.loss(5, slice(0, 2))[0], [recipe.loss(5, slice(i, i + 1))[0] for i in range(2)]
    assert torch.equal(again, loss)  # the step says it all
    torch.testing.assert_close(torch.stack(halves).mean(), loss)


def test_a_step_keeps_the_inputs_of_one_eviction(tmp_path: Path, monkeypatch):
    """The inputs at all evictions of a long answer would not fit a GPU."""
    recipe, inputs = recipe_of(build("llama"), tmp_path), []
    add = PolicyGradient.add

    def watched(policy, choice):
        assert [x() for x in inputs] == [None] * len(inputs)
        inputs.append(weakref.ref(choice.x))
        add(policy, choice)

    monkeypatch.setattr(PolicyGradient, "add", watched)
    loss, _ = recipe.loss(0, slice(0, 2))
    evictions = 1 + 29 // 8  # after the prompt, and as often while the answer is read
    assert len(inputs) == 2 * evictions * len(recipe.loaded.geometry)
    assert [x() for x in inputs] == [None] * len(inputs)
    assert loss.requires_grad


def test_training_begins_with_the_scorer_that_was_given(tmp_path: Path):
    recipe = recipe_of(build("llama"), tmp_path)
    for name, tensor in recipe.tensors().items():
        torch.testing.assert_close(tensor, recipe.before[name], rtol=1e-4, atol=1e-5)
    _, figures = recipe.loss(0, slice(0, 2))
    assert figures["kl"] == pytest.approx(0, abs=1e-6)
    card = json.loads((tmp_path / "foresightkv.json").read_text())
    assert recipe.card()["began_with"] == {"sha256": card["sha256"], "command": "kvbench train this"}


@pytest.mark.parametrize(("name", "heads"), [("qwen3", 2), ("qwen3", 4), ("llama", 4), ("gemma2", 2)], ids=str)
def test_other_models_train_through_the_same_code(name, heads, tmp_path: Path, monkeypatch):
    """Random models that draw at random: a few steps on four answers raise the reward on these."""
    monkeypatch.setitem(models.BASE, "num_key_value_heads", heads)
    loaded = build(name)
    recipe = recipe_of(loaded, tmp_path)
    (tmp_path / "out").mkdir()
    done = train(recipe, tmp_path / "out", base=Base(name=name, config=loaded.model.config))
    assert done.path.name == "foresightkv.safetensors"
    assert done.card["made"]["recipe"] == "foresightkv-grpo"
    assert all(math.isfinite(value) for value in done.after.values())
    moved = [not torch.equal(t, recipe.before[n]) for n, t in recipe.tensors().items()]
    assert any(moved)
    method = ForesightKV(scorer=str(done.path))
    engine = Engine(loaded, method, budget=24, interval=8, slots=1, max_tokens=80)
    [answer] = engine.generate([Request(task="t", doc_id="0", prompt_ids=(3,) * 40, max_new_tokens=20)])
    assert answer.usage.evictions == 3


@pytest.fixture(scope="module")
def loaded():
    return load(str(tiny.path()), device="cpu")


def test_training_raises_the_reward(loaded, tmp_path: Path):
    """From a scorer that knows nothing, on two answers of the built-in model that are also held out."""
    traces = collect(loaded, built_in(("chain",), 2, 0, loaded))
    more = MORE | {"budget": 64, "interval": 32, "group": 8, "init": str(scorer_file(loaded, tmp_path))}
    settings = dataclasses.replace(SETTINGS, steps=25, lr=3e-2, batch=2, more=more)
    recipe = PolicyRecipe(loaded, settings, traces, traces)
    (tmp_path / "out").mkdir()
    done = train(recipe, tmp_path / "out", base=Base(name="tiny", config=loaded.model.config))
    assert done.improved(recipe)
    assert done.after["loss_increase"] < 0.9 * done.before["loss_increase"]
    assert done.after["loss_ratio"] < done.before["loss_ratio"]


def test_the_shipped_scorer_loses_less_than_what_others_keep(loaded):
    asked = collect(loaded, built_in(("chain",), 8, 0, loaded, held_out=True))
    forced = [
        Request(task="t", doc_id=t.name, prompt_ids=t.prompt, forced=t.answer, max_new_tokens=len(t.answer))
        for t in asked
    ]
    names = ("golden", "random", "foresightkv", "gkv", "rkv")
    chosen = [Chosen(method=MethodChoice(name=name), budget=64) for name in names]
    traces = [ForcedTrace(request=request, cluster=request.doc_id) for request in forced]
    rows = replay(loaded, "t", traces, chosen, interval=32, max_tokens=300).rows
    loss = {row["method"]: row["loss_increase"] for row in rows}
    assert len(asked) == 8
    assert loss["golden"] < loss["foresightkv"] < 0.8 * min(loss["gkv"], loss["rkv"])


def test_the_command(loaded, tmp_path: Path, capsys):
    path = scorer_file(loaded, tmp_path)
    command = ["train", "foresightkv-grpo", "--out", str(tmp_path / "o"), "--samples", "2", "--steps", "1", "-q"]
    assert main([*command, "--batch", "1", "--opt", "group=2", "--opt", f"init={path}", "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["kind"] == "foresightkv"
    assert Path(document["path"]).name == "foresightkv.safetensors"


def test_without_a_scorer_it_says_what_makes_one(tmp_path: Path):
    loaded = build("llama")
    settings = dataclasses.replace(SETTINGS, more=MORE | {"init": "auto"})
    with pytest.raises(UserError, match="train one with 'kvbench train foresightkv', then give --opt init=PATH"):
        PolicyRecipe(loaded, settings, random_traces(1), random_traces(1))
    beside = dataclasses.replace(loaded, folder=tmp_path)
    scorer_file(loaded, tmp_path)
    PolicyRecipe(beside, settings, random_traces(1), random_traces(1))


def test_a_scorer_that_is_untrained_in_an_evicted_layer_is_refused(tmp_path: Path):
    loaded = build("gemma2")  # layer 1 has a window of 24 tokens
    for layers, others in (([0, 1, 2], 0), ([0, 2], 0), ([2], 1)):
        init = str(scorer_file(loaded, tmp_path, layers=layers))
        settings = dataclasses.replace(SETTINGS, more=MORE | {"init": init})
        if others:
            with pytest.raises(UserError, match=r"are untrained in 1 layer .* \(the first is layer 0\)"):
                PolicyRecipe(loaded, settings, random_traces(1), random_traces(1))
        else:
            assert PolicyRecipe(loaded, settings, random_traces(1), random_traces(1)).card()["layers"] == [0, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": "mine"}, "--opt reward must be one of squared, large, low, high, all; got 'mine'."),
        ({"group": 1}, "--opt group must be 2 or more; got 1."),
        (
            {"budget": 500},
            "all answers to train on, or all held-out answers, are too short for an eviction at a budget of 500.",
        ),
    ],
)
def test_mistakes(changes, message, tmp_path: Path):
    with pytest.raises(UserError) as error:
        recipe_of(build("llama"), tmp_path, **changes)
    assert str(error.value).startswith(message)
