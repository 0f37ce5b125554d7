"""triattention's table: the queries are those of the model before RoPE, and the shipped table can be made again."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from support.models import build

from kvbench import tiny
from kvbench.cli.app import main
from kvbench.taskkit.synthetic.problem import HELD_OUT
from kvbench.train.recipes import mean_queries as module
from kvbench.train.recipes.mean_queries import mean_queries

TEXTS = [tuple(range(3, 30)), tuple(range(50, 71))]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_queries_before_rotation(name):
    """llama's queries are those that q_proj gives; gemma2 has layers with a sliding window, which stay 0."""
    model, outputs = build(name), {}
    got, modulus = mean_queries(model, TEXTS)
    model.model.set_attn_implementation("eager")  # the others leave out gemma2's cap of logits
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(lambda _, __, out, i=i: outputs.setdefault(i, []).append(out[0]))
        for i, layer in enumerate(model.model.model.layers)
    ]
    for text in TEXTS:
        model.model(torch.tensor([text]))
    for hook in hooks:
        hook.remove()
    for g in model.geometry:
        queries = torch.cat(outputs[g.index]).unflatten(-1, (g.query_heads, -1)).double()  # [tokens, Hq, d]
        half = queries.shape[-1] // 2
        if g.window is not None:
            assert not got[g.index].any()
            assert not modulus[g.index].any()
            continue
        torch.testing.assert_close(got[g.index].double(), queries.mean(dim=0), rtol=1e-4, atol=1e-5)
        lengths = torch.hypot(queries[..., :half], queries[..., half:]).mean(dim=0)
        torch.testing.assert_close(modulus[g.index].double(), lengths, rtol=1e-4, atol=1e-5)


def test_the_texts_are_no_evaluation_problems(monkeypatch):
    seeds = []
    for variant in (module.VARIANTS[name] for name in module.TINY_TEXTS):
        original = type(variant).generate
    monkeypatch.setattr(type(variant), "generate", lambda self, seed: (seeds.append(seed), original(self, seed))[1])
    monkeypatch.setattr(module, "is_tiny", lambda loaded: True)
    texts = module._texts(None, 6, seed=2)
    assert len(set(texts)) == 6
    assert len(set(seeds)) == 6
    assert max(seeds) < HELD_OUT


def test_the_shipped_table_can_be_made_again(tmp_path, capsys):
    shipped = json.loads((tiny.path() / "triattention.json").read_text())
    made = shipped["made"]
    command = ["train", "triattention", "--samples", str(made["samples"]), "--seed", str(made["seed"])]
    assert main([*command, "--out", str(tmp_path)]) == 0
    assert "concentration" in capsys.readouterr().out
    card = json.loads((tmp_path / "triattention.json").read_text())
    assert card["made"] | {"command": ""} == made | {"command": ""}
    ours, theirs = (load_file(folder / "triattention.safetensors") for folder in (tmp_path, tiny.path()))
    for name in ("mean", "modulus"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-4)
