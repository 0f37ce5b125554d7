"""Training of kvzap: its targets are kvzip's scores times norms, and its networks learn them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models import build

from kvbench import tiny
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import load
from kvbench.engine.model.weights import Base
from kvbench.errors import UserError
from kvbench.records import Request
from kvbench.registry import methods
from kvbench.train.loop import train
from kvbench.train.recipe import Settings
from kvbench.train.recipes.kvzap import LEAST, ZapRecipe
from kvbench.train.traces import Trace, built_in

MORE = {"width": 6, "tokens": 40, "target": "kvzip+"}
SETTINGS = Settings(steps=10, lr=5e-3, warmup=2, batch=4, more=MORE)


@pytest.fixture(scope="module")
def loaded():
    return load(str(tiny.path()), device="cpu")


@pytest.fixture(scope="module")
def traces(loaded):
    asked = built_in(("lookup", "walk"), 10, 0, loaded)
    traces = [Trace(name=q.name, prompt=q.ids[:30], answer=q.ids[30:44]) for q in asked]
    return traces[:8], traces[8:]


def eager_target(loaded, ids, n, norms):
    """The target in every layer from the attention that transformers itself returns, [L, Hk, n]."""
    model, inputs = loaded.model, []
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda _, __, kw: inputs.append(kw["hidden_states"]), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            out = model(torch.tensor([ids]), output_attentions=True, use_cache=True)
    finally:
        model.set_attn_implementation(before)
        for hook in hooks:
            hook.remove()
    targets = []
    for i, (paid, x) in enumerate(zip(out.attentions, inputs)):
        values = out.past_key_values.layers[i].values[0]  # [Hk, total, d]
        paid = paid[0, :, -n:, :n]
        if norms:
            heads, d = paid.shape[0], values.shape[-1]
            matrix = model.model.layers[i].self_attn.o_proj.weight
            paid = paid / x[0, -n:].norm(dim=-1)[:, None]
            moved = [values[h * len(values) // heads, :n] @ matrix[:, h * d : (h + 1) * d].T for h in range(heads)]
            paid = paid * torch.stack(moved).norm(dim=-1)[:, None]
        targets.append(paid.amax(dim=1).unflatten(0, (len(values), -1)).amax(dim=1))
    return torch.stack(targets).clamp_min(LEAST).log()


@pytest.mark.parametrize("target", ["kvzip+", "kvzip"])
def test_the_target_is_read_from_the_models_own_attention(loaded, traces, target, monkeypatch):
    monkeypatch.setattr("kvbench.train.recipes.kvzap.BLOCK", 13)
    recipe = ZapRecipe(loaded, replace(SETTINGS, more=MORE | {"target": target}), *traces)
    ids, n = recipe.text(traces[0][0])
    assert n == 40  # the text is cut
    assert tuple(ids[:n]) == tuple(ids[-n:]) == traces[0][0].ids[:n]
    hidden, got = recipe.read(traces[0][0])
    assert [tuple(x.shape) for x in hidden] == [(1, n, 128)] * 4
    torch.testing.assert_close(got, eager_target(loaded, ids, n, target == "kvzip+"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [0, 6])
def test_it_learns_and_the_engine_scores_with_it(loaded, traces, tmp_path: Path, width):
    recipe = ZapRecipe(loaded, replace(SETTINGS, more=MORE | {"width": width}), *traces)
    assert ("in.weight" in recipe.parameters()) == bool(width)
    done = train(recipe, tmp_path, base=Base(name="tiny", config=loaded.model.config))
    assert done.improved(recipe)
    assert done.after["r2"] > done.before["r2"]
    trace, events = traces[1][0], []
    method = methods.get("kvzap")(surrogate=str(done.path), recent=2, level="head")
    sizes = {"budget": 12, "interval": 32, "slots": 1, "max_tokens": 80}
    engine = Engine(loaded, method, **sizes, log=lambda *event: events.append(event))
    list(engine.generate([Request(task="t", doc_id="d", prompt_ids=trace.ids, max_new_tokens=2)]))
    with torch.no_grad():
        guess, _ = recipe.pair(replace(trace, answer=trace.answer[:10]))  # the first 40 tokens
    kept = {layer: heads for _, seen, layer, heads in events if seen == len(trace.ids)}
    for layer, heads in kept.items():
        for head, positions in enumerate(heads):
            inside = [p for p in positions.tolist() if p < 40]
            best = set(guess[layer, head].topk(len(inside)).indices.tolist())
            assert best == set(inside)


class Plain(ZapRecipe):
    def text(self, trace):  # the random models have no tokenizer
        return [*trace.ids, 1, 2, *trace.ids], len(trace.ids)


TEXTS = [Trace(name=str(i), prompt=tuple(range(3 + i, 40 + i)), answer=(5, 6)) for i in range(3)]


def test_layers_with_a_sliding_window_have_no_networks():
    model = build("gemma2")
    recipe = Plain(model, SETTINGS, TEXTS[:2], TEXTS[2:])
    sliding = [g.index for g in model.geometry if g.window is not None]
    assert sliding
    assert not recipe.parameters()["out.bias"][sliding].any()
    assert bool(recipe.parameters()["out.bias"][recipe.layers].all())
    assert recipe.held_out()["loss"] > 0


def test_layers_with_a_window_that_hides_nothing_have_networks():
    recipe = Plain(build("mistral-wide"), SETTINGS, TEXTS[:2], TEXTS[2:])
    assert recipe.layers == [0, 1, 2]
    assert bool(recipe.parameters()["out.bias"].all())
    assert recipe.held_out()["loss"] > 0


def test_texts_read_twice_must_fit_into_the_context():
    model = build("qwen3")
    assert model.context == 512
    long = Trace(name="long", prompt=tuple(range(3, 150)) * 2, answer=(5, 6))
    with pytest.raises(UserError, match=r"up to 594 tokens, .* context has 512\. Give shorter texts with --data"):
        Plain(model, SETTINGS, [long, *TEXTS[:2]], TEXTS[2:])


def test_settings_are_checked(loaded):
    with pytest.raises(UserError, match=r"--opt target must be kvzip\+ or kvzip; got 'x'"):
        ZapRecipe.check(loaded, MORE | {"target": "x"})
    with pytest.raises(UserError, match=r"--opt tokens must be 1 or more"):
        ZapRecipe.check(loaded, MORE | {"tokens": 0})
