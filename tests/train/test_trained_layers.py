"""The card lists the layers that a training reached; a run that would evict another layer ends before it begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import zoo
from support.models import VOCABULARY, build

from kvbench.cli.app import main
from kvbench.engine.model.load import load
from kvbench.engine.model.random_weights import draw
from kvbench.engine.model.weights import Base, save_weights
from kvbench.eviction.choose import make
from kvbench.train.catalogue import BUILT_IN, recipe_class
from kvbench.train.head_data import Example
from kvbench.train.recipe import Settings
from kvbench.train.recipes import head_tables, mean_queries
from kvbench.train.traces import Trace

SMALL: dict[str, dict[str, Any]] = {
    "lookaheadkv": {"rows": 2, "rank": 2},
    "trimkv": {"width": 4},
    "retention": {"width": 4},
    "kvzap": {"width": 0, "tokens": 60},
    "locret": {"width": 4},
    "foresightkv": {"budget": 24, "interval": 8},
    "duo": {"recent": 8},
}
IDS = tuple(torch.randint(VOCABULARY, (60,), generator=torch.Generator().manual_seed(0)).tolist())
TRACES = [Trace(name="a", prompt=IDS[:30], answer=IDS[30:])]
EXAMPLES = [Example(IDS, (58,), ((5,),))]


@pytest.mark.parametrize("name", SMALL)
def test_the_card_lists_the_layers_whose_window_holds_the_texts(name):
    """gemma2's layer 1 has a window of 24 tokens; texts have 60."""
    more = BUILT_IN[name].settings("m") | SMALL[name]
    items = EXAMPLES if name == "duo" else TRACES
    settings = Settings(steps=1, lr=1e-3, batch=1, more=more)
    assert recipe_class(name)(build("gemma2"), settings, items, items).card()["layers"] == [0, 2]


def test_the_cards_of_tables_list_them_too(monkeypatch):
    monkeypatch.setattr(head_tables, "text_examples", lambda *_: EXAMPLES)
    monkeypatch.setattr(mean_queries, "text_examples", lambda *_: EXAMPLES)
    for module in (head_tables, mean_queries):
        assert module.estimate(build("gemma2"), 1, 0).made["layers"] == [0, 2]
        assert module.estimate(build("mistral-wide"), 1, 0).made["layers"] == [0, 1, 2]


def test_a_window_that_holds_every_example_hides_no_evidence():
    assert bool((head_tables.attention_shares(build("mistral-wide"), EXAMPLES) > 0).all())


def test_a_run_that_evicts_an_untrained_layer_is_refused(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = zoo.repository(tmp_path / "m", zoo.configuration("gemma2", {"sliding_window": 240}))
    loaded = load(str(folder), device="cpu")
    assert [g.window for g in loaded.geometry] == [240, None]
    weights, base = make("trimkv", {}).weights(), Base(name="m", config=loaded.model.config)
    run = "run --model m --method trimkv --budget 48 --interval 16 --task walk/orbit-100 --limit 1 --samples 1 -q"
    for number, (layers, tokens, refused) in enumerate((([1], 16, True), ([1], 200, False), (None, 16, False))):
        made = {} if layers is None else {"layers": layers}
        save_weights(folder / "trimkv.safetensors", "trimkv", draw(weights, loaded.model), base, made=made)
        capsys.readouterr()
        code = main([*run.split(), "--max-new-tokens", str(tokens), "--run-name", f"r{number}"])
        err = capsys.readouterr().err
        assert code == (2 if refused else 0), err
        line = "are untrained in 1 layer that the method would evict (the first is layer 0): their sliding windows"
        assert (line in err) == refused
