"""Supervised training of foresightkv: what the scorer reads is what the engine shows it, and the oracle leads."""

from __future__ import annotations

import dataclasses
import json
from itertools import groupby
from pathlib import Path

import pytest
import torch
from kvbench.methods.foresightkv import ForesightKV
from support import models
from support.models import VOCABULARY, build

from kvbench import tiny
from kvbench.cli.app import main
from kvbench.engine.attention.interface import route
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import load
from kvbench.engine.model.weights import Base, load_weights
from kvbench.errors import UserError
from kvbench.eviction.choose import make
from kvbench.eviction.terms import objectives
from kvbench.eviction.terms.foresight import drop_scores, scorer_shapes
from kvbench.eviction.terms.golden import block_attention, golden_evictions
from kvbench.eviction.terms.objectives import ranking_losses
from kvbench.records import Request
from kvbench.replay.reader import TraceReader
from kvbench.replay.reference import read_full
from kvbench.replay.traces import ForcedTrace
from kvbench.train.foresight_scorer import Moments, TrainedScorer
from kvbench.train.foresight_states import Evictions
from kvbench.train.loop import train
from kvbench.train.recipe import Settings
from kvbench.train.recipes.foresightkv import ForesightRecipe
from kvbench.train.recipes.foresightkv_grpo import PolicyRecipe
from kvbench.train.traces import Trace, built_in, collect

MORE = {"budget": 24, "interval": 8, "features": "paper6", "hidden": 8, "within": "mean", "margin": 0.01}
SETTINGS = Settings(steps=8, lr=1e-2, warmup=2, batch=4, more=MORE)


def random_traces(count, prompt=40, answer=40, seed=5):
    generator = torch.Generator().manual_seed(seed)

    def tokens(length):
        return tuple(torch.randint(0, VOCABULARY, (length,), generator=generator).tolist())

    return [Trace(name=f"t{i}", prompt=tokens(prompt), answer=tokens(answer)) for i in range(count)]


def by_value(x):
    """Rows [n, D] of every head in an order that does not depend on where they lay."""
    return torch.stack([rows[rows[:, 0].argsort()] for rows in x.flatten(0, 1)])


class Led(ForesightKV):
    """The method in the engine, forced along the oracle's evictions; notes what its scorer would read."""

    def __init__(self, found, future, **options):
        super().__init__(**options)
        object.__setattr__(self, "found", found)
        object.__setattr__(self, "future", future)

    def weights(self):
        return None

    def score(self, view):
        competing = self.competing(view)
        x = self.inputs(view)[competing].unflatten(0, (*competing.shape[:2], -1))
        self.found[view.layer, int(view.seen[0])] = x
        recent = self.protect(view.budget).at(view.interval).recent
        return make("golden", {"recent": recent, "within": "mean"}).score(
            dataclasses.replace(view, weights=self.future)
        )


@pytest.mark.parametrize("name", ["qwen3", "llama", "gemma2"])  # gemma2: a sliding layer, capped logits
@pytest.mark.parametrize("features", ["paper6", "released8", "attn"])
@pytest.mark.parametrize("prompt", [40, 20])  # beyond the budget, and below
def test_inputs_are_what_the_engine_shows_the_method(name, features, prompt):
    loaded, [trace] = build(name), random_traces(1, prompt=prompt, answer=45)
    evictions = Evictions(loaded, ForesightKV(features=features), budget=24, interval=8, longest=100)
    choices = evictions.golden(trace).choices
    request = Request(
        task="t", doc_id="0", prompt_ids=trace.prompt, forced=trace.answer, max_new_tokens=len(trace.answer)
    )
    full = TraceReader(loaded, make("full", {}), budget=None, interval=8, max_tokens=100)
    future = read_full(full, [ForcedTrace(request=request, cluster="0")]).future()
    found = {}
    engine = Engine(
        loaded, Led(found, future, features=features), budget=24, interval=8, slots=1, max_tokens=100, layout="dense"
    )
    list(engine.generate([request]))
    ours = {(choice.layer, choice.seen): choice.x for choice in choices}
    assert len(ours) >= 2 * 4
    assert ours.keys() <= found.keys()
    for place, x in ours.items():
        torch.testing.assert_close(by_value(x), by_value(found[place]), rtol=1e-3, atol=1e-4)


def queries_and_keys(loaded, ids):
    seen = {}

    def attend(call):
        seen[call.layer] = call.query[0], call.key[0]
        out = torch.nn.functional.scaled_dot_product_attention(
            call.query, call.key, call.value, is_causal=True, scale=call.scaling, enable_gqa=True
        )
        return out.transpose(1, 2)

    with torch.inference_mode(), route(loaded.model, attend):
        loaded.model(input_ids=torch.tensor([ids]), position_ids=torch.arange(len(ids))[None], attention_mask=None)
    return seen


def test_evictions_are_those_of_the_label_maker():
    """A prompt that fills the cache, and the newest L protected: golden eviction as the paper has it."""
    budget, interval = 24, 8
    loaded, [trace] = build("qwen3"), random_traces(1, prompt=budget, answer=41)
    evictions = Evictions(loaded, ForesightKV(recent=interval), budget=budget, interval=interval, longest=100)
    choices = evictions.golden(trace).choices
    for layer, (queries, keys) in queries_and_keys(loaded, trace.ids[:-1]).items():
        scaling = loaded.geometry[layer].scaling
        attention = block_attention(queries, keys, interval, budget + interval, scaling=scaling)
        wanted = golden_evictions(attention, budget, interval)
        ours = [choice for choice in choices if choice.layer == layer]
        assert len(wanted.scores) == 4
        assert len(ours) == 5  # one more when the answer is over, of which nothing is left to be told
        for step, choice in enumerate(ours[:4]):
            worth = choice.worth[0].sort(dim=-1).values
            torch.testing.assert_close(worth, (-wanted.scores[step]).sort(dim=-1).values, rtol=1e-4, atol=1e-6)
            gone = choice.worth[0][choice.dropped[0]].view(2, interval).sort(dim=-1).values
            torch.testing.assert_close(gone, worth[:, :interval], rtol=0, atol=0)


def test_what_is_dropped_is_worth_least_and_no_newest_token_competes():
    loaded, [trace] = build("llama"), random_traces(1)
    for choice in Evictions(loaded, ForesightKV(), budget=24, interval=8, longest=100).golden(trace).choices:
        held = 40 if choice.seen == 40 else 24 + 8
        assert choice.dropped.shape == (1, 2, held - 6)  # a quarter of the budget is less than the interval
        assert choice.dropped.sum(dim=-1).tolist() == [[held - 24] * 2]
        for worth, gone in zip(choice.worth[0], choice.dropped[0]):
            assert worth[gone].max() <= worth[~gone].min()


def naive_ranking(scorer, choices, margin):
    """Pair by pair."""
    total = 0.0
    for layer, own in groupby(sorted(choices, key=lambda c: c.layer), key=lambda c: c.layer):
        rows = []
        for choice in own:
            phi = drop_scores(scorer, layer, choice.x)
            for scores, worth in zip(phi[0], choice.worth[0]):
                pairs = [(i, j) for i in range(len(worth)) for j in range(len(worth)) if worth[i] < worth[j]]
                if pairs:
                    i, j = (torch.tensor(side) for side in zip(*pairs))
                    rows.append((margin - (scores[i] - scores[j])).clamp_min(0).mean())
        total = total + torch.stack(rows).mean()
    return total


@pytest.mark.parametrize("margin", [0.01, 1.0])
def test_the_loss_and_its_gradient_are_those_of_the_definition(margin):
    settings = dataclasses.replace(SETTINGS, batch=2, more=MORE | {"margin": margin})
    recipe = ForesightRecipe(build("llama"), settings, random_traces(3, answer=20), random_traces(1, seed=6))
    wanted = [
        naive_ranking(recipe.trained.scorer(), recipe.evictions.golden(trace).choices, margin)
        for trace in recipe.batch(4, slice(0, 2))
    ]
    torch.stack(wanted).mean().backward()
    slopes = {name: p.grad.clone() for name, p in recipe.parameters().items()}
    for p in recipe.parameters().values():
        p.grad = None
    loss, _ = recipe.loss(4, slice(0, 2))
    loss.backward()
    torch.testing.assert_close(loss, torch.stack(wanted).mean(), rtol=1e-4, atol=1e-6)
    for name, p in recipe.parameters().items():
        torch.testing.assert_close(p.grad, slopes[name], rtol=1e-3, atol=1e-6)
    halves = [recipe.loss(4, slice(i, i + 1))[0] for i in range(2)]
    torch.testing.assert_close(torch.stack(halves).mean(), loss)


@pytest.mark.parametrize("pairs", [1, 500, 1 << 24])
def test_ranking_losses_have_the_gradient_of_the_pairs(pairs, monkeypatch):
    monkeypatch.setattr(objectives, "PAIRS", pairs)
    generator = torch.Generator().manual_seed(0)
    scores, wanted = (torch.randn(7, 12, generator=generator) for _ in range(2))
    wanted[2] = 1.0  # no order
    wanted[3, :6] = 0.0  # ties
    weights = torch.rand(7, generator=generator)
    slow, fast = (scores.clone().requires_grad_(True) for _ in range(2))
    found, counts = ranking_losses(fast, wanted, 0.3)
    (found * weights).sum().backward()
    ordered = wanted[:, :, None] > wanted[:, None]
    hinge = ((0.3 - (slow[:, :, None] - slow[:, None])).clamp_min(0) * ordered).sum(dim=(1, 2))
    expected = hinge / ordered.sum(dim=(1, 2)).clamp_min(1)
    (expected * weights).sum().backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(fast.grad, slow.grad, rtol=1e-4, atol=1e-7)
    assert counts.tolist() == [row != 2 for row in range(7)]


def test_the_scorer_in_training_is_the_one_that_is_written():
    loaded, [trace] = build("gemma2"), random_traces(1)
    choices = Evictions(loaded, ForesightKV(), budget=24, interval=8, longest=100).golden(trace).choices
    shapes = scorer_shapes("paper6", {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
                                      "head_dim": 16}, 8)  # fmt: skip
    trained = TrainedScorer.random(shapes, Moments(shapes, choices), seed=1, unit=3.0)
    assert {choice.layer for choice in choices} == {0, 2}
    assert bool((trained.deviation[1] == 1).all())  # the sliding layer
    for choice in choices:
        layer = choice.layer
        standard = (choice.x - trained.mean[layer][:, None]) / trained.deviation[layer][:, None]
        wanted = 3.0 * drop_scores(trained.parameters, layer, standard)
        torch.testing.assert_close(drop_scores(trained.scorer(), layer, choice.x), wanted, rtol=1e-3, atol=1e-4)
    written = {name: tensor.detach() for name, tensor in trained.scorer().items()}
    again = TrainedScorer.of(written, Moments(shapes, choices))
    for name, tensor in again.scorer().items():
        torch.testing.assert_close(tensor, written[name], rtol=1e-4, atol=1e-5)
        assert not written[name].requires_grad  # training goes on in copies


@pytest.mark.parametrize(
    ("name", "heads"), [("qwen3", 2), ("qwen3", 4), ("llama", 2), ("llama", 4)], ids=str
)  # groups of two, and none
def test_other_models_train_through_the_same_code(name, heads, tmp_path: Path, monkeypatch):
    monkeypatch.setitem(models.BASE, "num_key_value_heads", heads)
    loaded = build(name)
    recipe = ForesightRecipe(loaded, SETTINGS, random_traces(6), random_traces(2, seed=6))
    done = train(recipe, tmp_path, base=Base(name=name, config=loaded.model.config))
    assert done.after["loss"] < done.before["loss"]
    tensors = load_weights(
        ForesightKV(scorer=str(done.path)).weights(), None, loaded.model.config, "cpu"
    )  # its card and shapes fit the model
    assert tensors["w1"].shape == (3, heads, 2 * 16 + 6 * 4 // heads, 8)
    method = ForesightKV(scorer=str(done.path), sampling=False)
    engine = Engine(loaded, method, budget=24, interval=8, slots=1, max_tokens=80)
    [answer] = engine.generate([Request(task="t", doc_id="0", prompt_ids=(3,) * 40, max_new_tokens=20)])
    assert answer.usage.evictions == 3


@pytest.fixture(scope="module")
def loaded():
    return load(str(tiny.path()), device="cpu")


@pytest.fixture(scope="module")
def traces(loaded):
    asked = built_in(("chain",), 6, 0, loaded)
    return collect(loaded, asked), collect(loaded, built_in(("chain",), 2, 0, loaded, held_out=True))


def test_training_learns_to_agree_with_the_oracle(loaded, traces, tmp_path: Path):
    settings = dataclasses.replace(SETTINGS, steps=30, more=MORE | {"budget": 64, "interval": 32})
    recipe = ForesightRecipe(loaded, settings, *traces)
    weights = {name: p.clone() for name, p in loaded.model.named_parameters()}
    done = train(recipe, tmp_path, base=Base(name="tiny", config=loaded.model.config))
    assert done.improved(recipe)
    assert done.after["agreement"] > done.before["agreement"] + 0.05
    assert done.card["made"]["recent"] == 16
    assert all(torch.equal(weights[name], p) for name, p in loaded.model.named_parameters())


def test_readings_beyond_the_memory_are_made_again(loaded, traces, monkeypatch):
    settings = dataclasses.replace(SETTINGS, more=MORE | {"budget": 64, "interval": 32})
    kept = ForesightRecipe(loaded, settings, *traces)
    monkeypatch.setattr("kvbench.train.recipes.foresightkv.ForesightRecipe.stores", 2 * kept._bytes // len(kept._read))
    some = ForesightRecipe(loaded, settings, *traces)
    assert len(some._read) == 2 < len(kept._read)
    assert some.loss(3, slice(0, 4))[0] == kept.loss(3, slice(0, 4))[0]
    assert len(some._read) == 2


def test_the_command(tmp_path: Path, capsys):
    command = ["train", "foresightkv", "--out", str(tmp_path), "--samples", "4", "--steps", "2", "--batch", "2"]
    assert main([*command, "--opt", "hidden=3", "--opt", "budget=48", "--json", "-q"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["shapes"]["w1"] == [4, 2, 2 * 32 + 6 * 2, 3]
    assert document["made"]["settings"]["more"]["budget"] == 48
    assert document["made"]["recent"] == 12
    assert str(tmp_path) not in json.dumps(document["made"])
    method = ["run", "--method", "foresightkv", "--method-opt", f"scorer={document['path']}", "--budget", "48"]
    assert main([*method, "--task", "chain", "--limit", "1", "--out", str(tmp_path / "r"), "-q"]) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": "paper8"}, "--opt features must be one of paper6, released8, attn; got 'paper8'."),
        ({"within": "most"}, "--opt within must be mean or max; got 'most'."),
        ({"budget": 1}, "--opt budget must be 2 or more; got 1."),
        ({"margin": 0.0}, "--opt margin must be above 0; got 0."),
        ({"hidden": 0}, "--opt hidden must be 1 or more; got 0."),
        (
            {"budget": 500},
            "all answers to train on, or all held-out answers, are too short for an eviction at a budget of 500.",
        ),
    ],
)
def test_mistakes(changes, message):
    settings = dataclasses.replace(SETTINGS, more=MORE | changes)
    with pytest.raises(UserError) as error:
        ForesightRecipe(build("llama"), settings, random_traces(1), random_traces(1))
    assert str(error.value).startswith(message)


def test_layers_of_other_sizes_than_the_configuration_are_refused_before_anything_is_asked():
    """As in Gemma 4, whose layers with full attention have wider heads."""
    loaded = build("gemma2")
    geometry = tuple(g if g.window else dataclasses.replace(g, head_dim=2 * g.head_dim) for g in loaded.geometry)
    wider = dataclasses.replace(loaded, geometry=geometry)
    for recipe in (ForesightRecipe, PolicyRecipe):
        with pytest.raises(UserError, match=r"layer 0 has 2 KV heads of dimension 32\. Choose another model\.$"):
            recipe.check(wider, MORE)
    ForesightRecipe.check(wider, MORE | {"features": "attn"})  # which reads neither keys nor values
    ForesightRecipe.check(loaded, MORE)


def test_windows_in_every_layer_are_refused():
    loaded, settings = build("mistral-sliding"), dataclasses.replace(SETTINGS, more=MORE)
    with pytest.raises(UserError, match=r"window of at most 24 tokens, .* Give shorter texts .* up to 80 tokens"):
        ForesightRecipe(loaded, settings, random_traces(1), random_traces(1))
    with pytest.raises(UserError, match=r"Give shorter texts .* up to 25 tokens"):
        ForesightRecipe.check(loaded, MORE | {"min_tokens": 24})  # known before any answer
    ForesightRecipe.check(loaded, MORE | {"min_tokens": 24, "truncate": 8})


def test_answers_too_short_for_an_eviction_are_told():
    settings = dataclasses.replace(SETTINGS, more=MORE)
    budget, long = MORE["budget"], random_traces(2)
    short = random_traces(1, budget - 8, 3)
    made = ForesightRecipe(build("llama"), settings, [*long, *short], long)
    assert made.about_data() == ["left out: 1 answer too short for an eviction; 2 train, 2 are held out."]
    assert ForesightRecipe(build("llama"), settings, long, long).about_data() == []


def test_traces_that_outgrow_the_budget():
    evictions = Evictions(build("llama"), ForesightKV(), budget=24, interval=8, longest=100)
    yes, no = ((25, 2), (24, 10), (20, 10)), ((24, 8), (24, 9), (20, 9), (40, 1))
    for (prompt, answer), wanted in [(case, True) for case in yes] + [(case, False) for case in no]:
        [trace] = random_traces(1, prompt, answer)
        assert evictions.evicts(trace) == wanted
        if answer > 1:
            before = [c for c in evictions.golden(trace).choices if c.seen < prompt + answer - 1]
            assert bool(before) == wanted
