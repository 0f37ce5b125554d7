"""Training of locret: its targets are the model's own logits, and its heads learn them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models import build

from kvbench.engine.attention.interface import AttentionCall
from kvbench.engine.loop import Engine
from kvbench.engine.model.weights import Base
from kvbench.errors import UserError
from kvbench.records import Request
from kvbench.registry import methods
from kvbench.train.loop import train
from kvbench.train.recipe import Settings
from kvbench.train.recipes.locret import LocretRecipe
from kvbench.train.traces import Trace

SETTINGS = Settings(steps=12, lr=2e-2, warmup=2, batch=2, more={"width": 8, "tokens": 20, "smooth": 0.01})
TEXTS = [
    Trace(name=str(i), prompt=tuple(range(3 + i, 30 + i)), answer=tuple(range(50, 57)))  # 27 and 7 tokens
    for i in range(4)
]


@pytest.fixture(scope="module")
def loaded():
    return build("llama")


def call(prompt, answer, **more):
    """A layer's attention call with 2 KV heads of 2 query heads each."""
    draw = torch.Generator().manual_seed(0)
    n = prompt + answer
    query, key = torch.randn(1, 4, n, 8, generator=draw), torch.randn(1, 2, n, 8, generator=draw)
    fields = {"window": None, "softcap": None, "sinks": None} | more
    return AttentionCall(layer=0, query=query, key=key, value=key, scaling=0.5, **fields)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_target_is_the_largest_logit_of_the_answer(loaded, monkeypatch, softcap):
    monkeypatch.setattr("kvbench.train.recipes.locret.BLOCK", 3)
    recipe = LocretRecipe(loaded, SETTINGS, TEXTS[:3], TEXTS[3:])
    trace = TEXTS[0]
    given = call(27, 7, softcap=softcap)
    target = recipe.target(given, 20, trace)
    assert target.shape == (2, 20)
    for head, j in ((0, 0), (0, 19), (1, 7)):
        logits = [
            float(given.query[0, 2 * head + g, t] @ given.key[0, head, j]) / 2 for g in range(2) for t in range(27, 34)
        ]
        wanted = torch.tensor(max(logits))
        wanted = wanted if softcap is None else softcap * torch.tanh(wanted / softcap)
        torch.testing.assert_close(target[head, j], wanted)


def test_neighbouring_scores_are_drawn_together(loaded):
    recipe = LocretRecipe(loaded, SETTINGS, TEXTS[:3], TEXTS[3:])
    guess = torch.tensor([[[0.0, 1.0, 3.0]], [[2.0, 2.0, 2.0]]])  # squares of steps: 1, 4, 0, 0
    assert float(recipe.mistake(guess, guess)) == pytest.approx(0.01 * 2 * 5 / 4)
    assert float(recipe.mistake(guess[..., :1], guess[..., :1])) == 0.0


def test_it_learns_and_the_engine_scores_with_it(loaded, tmp_path: Path):
    recipe = LocretRecipe(loaded, SETTINGS, TEXTS[:3], TEXTS[3:])
    done = train(recipe, tmp_path, base=Base(name="m", config=loaded.model.config))
    assert done.improved(recipe)
    events = []
    method = methods.get("locret")(heads=str(done.path), recent=2)
    sizes = {"budget": 12, "interval": 32, "slots": 1, "max_tokens": 80}
    engine = Engine(loaded, method, **sizes, log=lambda *event: events.append(event))
    prompt = TEXTS[3].prompt[:20]
    list(engine.generate([Request(task="t", doc_id="d", prompt_ids=prompt, max_new_tokens=2)]))
    with torch.no_grad():
        guess, _ = recipe.pair(replace(TEXTS[3], prompt=prompt))
    kept = {layer: heads for _, seen, layer, heads in events if seen == 20}
    assert kept
    for layer, heads in kept.items():
        for head, positions in enumerate(heads):
            best = guess[layer, head, :18].topk(10).indices.tolist()
            assert positions.tolist() == sorted([*best, 18, 19])


def test_it_evicts_while_decoding_only_if_told():
    assert not methods.get("locret")().decode_bounded
    assert methods.get("locret")(decode=True).decode_bounded


def test_texts_without_an_answer_are_refused(loaded):
    with pytest.raises(UserError, match="row '0' of --data has no prompt or no answer"):
        LocretRecipe(loaded, SETTINGS, [replace(TEXTS[0], answer=())], TEXTS[3:])
