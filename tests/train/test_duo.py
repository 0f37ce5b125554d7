"""Training of duo: its mixture is full and streaming attention, its gradient is right, and it finds the heads."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from support.models import build
from support.recipes import change, speller

from kvbench import tiny
from kvbench.cli.app import main
from kvbench.engine.attention.interface import AttentionCall
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import load
from kvbench.engine.model.weights import Base, load_weights
from kvbench.errors import SetupError, UserError
from kvbench.eviction.api import Weights
from kvbench.records import Request
from kvbench.registry import methods
from kvbench.train.head_data import Example, passkey_examples, tiny_examples
from kvbench.train.loop import train
from kvbench.train.recipe import Settings
from kvbench.train.recipes.duo import DuoRecipe, _Mixture

MORE = {"sinks": 2, "recent": 6, "reg": 0.05}
SETTINGS = Settings(steps=4, lr=0.1, warmup=1, batch=2, more=MORE)


def example(length=30, rows=(20, 28), vocabulary=100):
    ids = torch.randint(vocabulary, (length,), generator=torch.Generator().manual_seed(5)).tolist()
    return Example(tuple(ids), rows, tuple((3,) for _ in rows))


def recipe(name="llama", **more):
    settings = Settings(steps=4, lr=0.1, batch=2, more=MORE | more)
    return DuoRecipe(build(name), settings, [example()], [example(rows=(25,))])


@torch.no_grad()
def by_transformers(name, example, sinks=None, recent=None):
    """Last hidden states of the answer's rows from transformers' own attention, with a mask that is given."""
    loaded, n = build(name), len(example.ids)
    loaded.model.set_attn_implementation("eager")
    at = torch.arange(n)
    seen = at[None] <= at[:, None]
    if sinks is not None:
        seen &= (at[None] < sinks) | (at[None] > at[:, None] - recent)
    mask = torch.zeros(n, n).masked_fill(~seen, float("-inf"))[None, None]
    masks = mask if sinks is not None else None
    out = loaded.model.model(torch.tensor([example.ids]), attention_mask=masks, use_cache=False)
    return out.last_hidden_state[0, list(example.rows)]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3n", "olmo2"])
def test_without_streaming_the_hidden_states_are_the_models_own(name):
    made = recipe(name)
    for alpha in (None, made.alpha):
        torch.testing.assert_close(hidden(made, alpha), by_transformers(name, example()), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def hidden(made, alpha):
    with made._mixing({} if alpha is None else dict(zip(made.layers, alpha))):
        return made._hidden(example())


@pytest.mark.parametrize("rows", [1024, 7])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_streaming_alone_is_a_mask(name, rows, monkeypatch):
    monkeypatch.setattr("kvbench.train.recipes.duo.ROWS", rows)
    made = recipe(name)
    found = hidden(made, torch.zeros_like(made.alpha))
    torch.testing.assert_close(found, by_transformers(name, example(), 2, 6), rtol=1e-4, atol=1e-4)
    assert (found - by_transformers(name, example())).abs().max() > 0.01


def test_every_group_of_query_heads_has_its_own_mixture():
    generator = torch.Generator().manual_seed(1)
    hq, hk, n, d = 6, 2, 12, 4
    q, k, v = (torch.randn(1, heads, n, d, generator=generator) for heads in (hq, hk, hk))
    call = AttentionCall(0, q, k, v, scaling=0.7, window=None, softcap=None, sinks=None)
    alpha = torch.tensor([0.25, 0.9])
    found = _Mixture({0: alpha}, 2, 3)(call)
    for head in range(hq):
        group = head // (hq // hk)
        for t in range(n):
            logits = 0.7 * k[0, group] @ q[0, head, t]
            full = [j for j in range(n) if j <= t]
            streaming = [j for j in full if j < 2 or j > t - 3]
            parts = [logits[keys].softmax(0) @ v[0, group, keys] for keys in (full, streaming)]
            wanted = alpha[group] * parts[0] + (1 - alpha[group]) * parts[1]
            torch.testing.assert_close(found[0, t, head], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("rows", "again"), [(1024, False), (7, False), (7, True)])
def test_the_gradient_is_that_of_the_loss(rows, again, monkeypatch):
    """Also where blocks or whole layers are computed again for it."""
    monkeypatch.setattr("kvbench.train.recipes.duo.ROWS", rows)
    made = recipe()
    made.again = again
    made.loaded.model.double()
    with torch.no_grad():
        made.alpha.uniform_(0.2, 0.8, generator=torch.Generator().manual_seed(0))
    made.alpha = made.alpha.detach().double().requires_grad_(True)
    loss, _ = made.loss(0, slice(0, 1))
    loss.backward()
    for place in ((0, 0), (1, 1), (2, 0)):
        values = []
        for step in (1e-2, -1e-2):
            with torch.no_grad():
                made.alpha[place] += step
                values.append(float(made.loss(0, slice(0, 1))[0]))
                made.alpha[place] -= step
        # hidden states come back in single precision
        assert float(made.alpha.grad[place]) == pytest.approx((values[0] - values[1]) / 2e-2, rel=0.02, abs=1e-4)


def test_the_loss_is_deviation_and_penalty():
    made = recipe()
    loss, figures = made.loss(0, slice(0, 2))
    assert figures == {"deviation": 0.0, "alpha": 1.0}
    assert float(loss.detach()) == pytest.approx(0.05)
    with torch.no_grad():
        made.alpha.fill_(0.5)
        found, _ = made.loss(0, slice(0, 2))
    mixed = hidden(made, made.alpha)
    wanted = (mixed - by_transformers("llama", example())).square().mean()
    assert float(found) == pytest.approx(float(wanted) + 0.025, rel=1e-4)


@pytest.mark.parametrize(("reg", "steps", "end"), [(-1.0, 4, 1.0), (50.0, 30, 0.0)])
def test_alpha_stays_between_0_and_1(tmp_path, reg, steps, end):
    """Whether the penalty pulls up or down, further than the range goes."""
    settings = Settings(steps=steps, lr=0.1, batch=2, more=MORE | {"reg": reg})
    made = DuoRecipe(build("llama"), settings, [example()], [example()])
    train(made, tmp_path, base=Base(name="m", config=made.loaded.model.config))
    alpha = made.tensors()["alpha"]
    assert end in (float(alpha.min()), float(alpha.max()))
    assert float(alpha.min()) >= 0.0
    assert float(alpha.max()) <= 1.0


def test_layers_with_a_sliding_window_are_left_out():
    made = recipe("gemma2")  # its middle layer has one
    assert made.layers == [0, 2]
    with torch.no_grad():
        made.alpha.fill_(0.75)
    assert made.tensors()["alpha"].tolist() == [[0.75, 0.75], [1.0, 1.0], [0.75, 0.75]]


def test_a_window_that_no_text_outgrows_is_none():
    settings = Settings(steps=4, lr=0.1, batch=2, more=MORE)
    made = DuoRecipe(build("gemma2"), settings, [example(20, (18,))], [example(20, (15,))])
    assert made.layers == [0, 1, 2]


@pytest.mark.parametrize(
    ("more", "message"),
    [({"sinks": -1}, "--opt sinks must be 0 or more; got -1."), ({"recent": 0}, "--opt recent must be 1 or more")],
)
def test_mistakes(more, message):
    with pytest.raises(UserError, match=message):
        recipe(**more)


def test_a_model_of_windows_alone_is_refused():
    loaded = build("gemma2")
    geometry = tuple(replace(g, window=8) for g in loaded.geometry)
    settings = Settings(steps=4, lr=0.1, batch=2, more=MORE)
    with pytest.raises(UserError, match=r"every layer of the model has a sliding window .* Give shorter texts"):
        DuoRecipe(replace(loaded, geometry=geometry), settings, [example()], [example()])


def test_no_weight_of_the_model_is_trained(tmp_path):
    made = recipe()
    before = {name: p.clone() for name, p in made.loaded.model.named_parameters()}
    train(made, tmp_path, base=Base(name="m", config=made.loaded.model.config))
    assert all(torch.equal(before[name], p) for name, p in made.loaded.model.named_parameters())


# the built-in model


@pytest.fixture(scope="module")
def built_in():
    return load(str(tiny.path()), device="cpu")


def test_training_finds_the_heads_that_retrieve(built_in, tmp_path):
    """Layer 1 does it in this model (docs/head-tables.md)."""
    examples = tiny_examples(20, seed=7)
    settings = Settings(steps=40, lr=0.06, warmup=2, batch=1, more={"sinks": 4, "recent": 32, "reg": 0.05})
    made = DuoRecipe(built_in, settings, examples[:16], examples[16:])
    done = train(made, tmp_path, base=Base(name="tiny", config=built_in.model.config))
    assert done.improved(made)
    assert done.after["half"] < 0.1 * done.before["half"]
    alpha = made.tensors()["alpha"]
    assert int(alpha.argmax()) == 2  # layer 1, head 0
    assert float(alpha[1].min()) > 2 * float(alpha[[0, 2, 3]].max())


def test_the_shipped_table_has_the_figures_of_its_card(built_in):
    """Its training takes minutes and was not run here; what came out is measured again on the same held-out texts."""
    card = json.loads((tiny.path() / "duo.json").read_text())["made"]
    more = card["settings"]["more"]
    examples = tiny_examples(more["samples"] + card["held_out"], card["settings"]["seed"])
    made = DuoRecipe(built_in, Settings(steps=1, lr=1.0, more=more), examples[:1], examples[more["samples"] :])
    assert made.held_out() == pytest.approx(card["held_out_before"], rel=1e-3)
    shipped = load_weights(Weights(kind="duo"), tiny.path(), built_in.model.config, "cpu")
    with torch.no_grad():
        made.alpha.copy_(shipped["alpha"])
    assert made.held_out() == pytest.approx(card["held_out_after"], rel=1e-3)


def test_the_method_streams_the_heads_with_the_smallest_alpha(built_in, tmp_path):
    examples = tiny_examples(2, seed=7)
    made = DuoRecipe(built_in, SETTINGS, examples[:1], examples[1:])
    with torch.no_grad():
        made.alpha.copy_(torch.tensor([[0.1, 0.9], [0.2, 0.8], [0.7, 0.3], [0.6, 0.4]]))
    path, _ = made.write(tmp_path, base=Base(name="tiny", config=built_in.model.config), made={})
    held = {}

    def log(_, seen, layer, heads):
        held.setdefault(layer, [len(positions) for positions in heads])

    method = methods.get("duo")(sinks=2, recent=6, sparsity=0.5, table=str(path))
    engine = Engine(built_in, method, budget=None, interval=32, slots=1, max_tokens=300, log=log)
    prompt = examples[0].ids[:100]
    list(engine.generate([Request(task="t", doc_id="d", prompt_ids=prompt, max_new_tokens=2)]))
    assert held == {0: [8, 100], 1: [8, 100], 2: [100, 8], 3: [100, 8]}


# texts


def test_passkey_texts_ask_for_every_code_and_differ_in_length():
    made = passkey_examples(speller(10_000, 7), 12, 0, 6000)
    lengths = [len(e.ids) for e in made]
    assert max(lengths) <= 6000
    assert min(lengths) < 3000 < max(lengths)
    for e in made:
        text = "".join(map(chr, e.ids))
        notes, _, answer = text.partition("\nQuestion: What are the codes?\nAnswer:")
        said, asked = (dict(re.findall(r"The code of ([a-z ]+) is (\d{5})\b", part)) for part in (notes, answer))
        assert len(said) == 10
        assert asked == said
        written = "".join(chr(e.ids[row + 1]) for row in e.rows)
        assert written == "".join(f" {code}" for code in asked.values())
        assert written == "".join(chr(e.ids[places[i % 6]]) for i, places in enumerate(e.evidence))
    with pytest.raises(SetupError, match=r"the shortest training text has .* but the limit is 500"):
        passkey_examples(speller(500), 1, 0, 4096)


# the command


def test_the_command(tmp_path, capsys):
    arguments = ["train", "duo", "--out", str(tmp_path), "--samples", "2", "--steps", "2", "--batch", "1", "--json"]
    assert main([*arguments, "-q"]) == 0
    card = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert card["shapes"] == {"alpha": [4, 2]}
    assert card["made"]["settings"]["more"] | {"sinks": 4, "recent": 32} == card["made"]["settings"]["more"]
    assert card["made"]["command"].endswith("--opt sinks=4 --opt recent=32 --opt reg=0.05 --opt tokens=4096 --out DIR")
    run = ["run", "--method", "duo", "--method-opt", f"table={card['path']}", "--method-opt", "sparsity=0.5"]
    assert main([*run, "--task", "lookup", "--limit", "1", "--out", str(tmp_path / "r"), "-q"]) == 0


def test_a_folder_model_reads_english(tmp_path, capsys, monkeypatch):
    """A copy of the built-in model is not the built-in model; its byte tokens can spell anything."""
    change(monkeypatch, "duo", held_out=1)
    copy = shutil.copytree(tiny.path(), tmp_path / "copy", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    arguments = ["train", "duo", "--model", str(copy), "--out", str(tmp_path), "--samples", "1", "--steps", "1"]
    assert main([*arguments, "--batch", "1", "--opt", "tokens=1500", "-q"]) == 0
    card = json.loads((tmp_path / "duo.json").read_text())
    more = card["made"]["settings"]["more"]
    assert (more["sinks"], more["recent"], more["tokens"]) == (128, 256, 1500)
    (data := tmp_path / "q.jsonl").write_text('{"question": "a"}\n')
    assert main([*arguments, "--data", str(data)]) == 2
    assert "duo makes its own training texts; leave out --data" in capsys.readouterr().err
