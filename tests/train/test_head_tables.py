"""The head table: the problems it is estimated on, the attention it counts, and the command that writes it."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from support.models import build
from support.recipes import speller

from kvbench import tiny
from kvbench.cli.app import main
from kvbench.engine.model.load import load
from kvbench.engine.model.weights import load_weights
from kvbench.errors import SetupError
from kvbench.eviction.api import Weights
from kvbench.taskkit.synthetic.problem import HELD_OUT
from kvbench.train import head_data
from kvbench.train.catalogue import BUILT_IN, TABLES
from kvbench.train.head_data import Example, text_examples, tiny_examples
from kvbench.train.recipes.head_tables import attention_shares, importance


@pytest.fixture(scope="module")
def model():
    return load(str(tiny.path()), device="cpu")


# data


def test_tiny_examples_point_at_the_fact_that_is_asked_for(model):
    for example in tiny_examples(3, seed=0):
        assert len(example.rows) == len(example.evidence) == 16
        for row, places in zip(example.rows, example.evidence):
            name, tens, units = (model.tokenizer.decode([example.ids[at]]) for at in places)
            here, after = (model.tokenizer.decode([example.ids[at]]) for at in (row, row + 1))
            assert (here, after) in ((name, tens), (tens, units))
            assert max(places) < row


def test_tiny_examples_are_no_evaluation_problems(monkeypatch):
    seeds = []
    variant = head_data.VARIANTS["lookup-8"]
    monkeypatch.setattr(type(variant), "generate", lambda self, seed: seeds.append(seed))
    monkeypatch.setattr(head_data, "_of_lookup", lambda problem: problem)
    tiny_examples(50, seed=1)
    assert len(set(seeds)) == 50
    assert max(seeds) < HELD_OUT


def test_text_examples_point_at_the_code_that_is_asked_for():
    for example in text_examples(speller(10_000, 7), 5, 0):
        text = "".join(map(chr, example.ids))
        code = "".join(chr(example.ids[at]) for at in example.evidence[0])
        answer = "".join(chr(example.ids[row + 1]) for row in example.rows)
        asked = text.partition("What is the code of ")[2].partition("?")[0]
        assert example.ids[0] == 7
        assert answer == code == text[-len(code) :]
        assert f"The code of {asked} is{code}." in text
        assert text.count("The code of") == head_data.NOTES + 1
        assert all(places == example.evidence[0] for places in example.evidence)


def test_text_examples_are_cut_to_what_the_model_reads():
    short, long = (text_examples(speller(longest), 2, 0) for longest in (700, 10_000))
    for example in short:
        assert 600 < len(example.ids) <= 700
        assert "".join(map(chr, example.ids)).count("The code of") == head_data.NOTES + 1
    assert all(2000 < len(example.ids) <= head_data.LONGEST for example in long)
    with pytest.raises(SetupError, match=r"the shortest training text has .* but the limit is 300"):
        text_examples(speller(300), 1, 0)


@pytest.mark.parametrize("make", [tiny_examples, lambda n, seed: text_examples(speller(2000), n, seed)])
def test_examples_follow_the_seed(make):
    assert make(3, 5) == make(3, 5)
    assert make(3, 5) != make(3, 6)


# attention


def examples_of(vocabulary=100, length=40):
    generator = torch.Generator().manual_seed(3)
    made = []
    for rows in ((20, 30, 39), (38,)):
        ids = torch.randint(vocabulary, (length,), generator=generator).tolist()
        made.append(Example(tuple(ids), rows, tuple((3, row // 2) for row in rows)))
    return made


def eager_shares(model, examples, marked):
    """The same from the attention that transformers itself returns."""
    model.model.set_attn_implementation("eager")
    total, rows = 0, 0
    for example in examples:
        with torch.inference_mode():
            out = model.model(torch.tensor([example.ids]), output_attentions=True)
        weights = torch.stack(out.attentions)[:, 0, :, list(example.rows)]  # [L, Hq, rows, n]
        total = total + (weights * marked(example, "cpu")).sum(dim=(-1, -2))
        rows += len(example.rows)
    return total.double() / rows


def on_evidence(example, device):
    mask = torch.zeros(len(example.rows), len(example.ids), dtype=torch.bool)
    for row, places in zip(mask, example.evidence):
        row[list(places)] = True
    return mask


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_shares_are_those_of_transformers_own_attention(name):
    """gemma2 caps its logits, and its sliding layer is left out."""
    model, examples = build(name), examples_of()
    got = attention_shares(model, examples)
    want = eager_shares(build(name), examples, on_evidence)
    full = [g.index for g in model.geometry if g.window is None]
    torch.testing.assert_close(got[full], want[full], rtol=1e-4, atol=1e-6)
    assert bool((got[full] > 0).all())
    assert not got[[g.index for g in model.geometry if g.window is not None]].any()


def test_the_model_is_as_before():
    model = build("llama")
    before = model.model.config._attn_implementation
    attention_shares(model, examples_of())
    assert model.model.config._attn_implementation == before


def test_a_long_example_is_read_in_blocks(monkeypatch):
    model, examples = build("llama"), examples_of()
    whole = importance(model, examples)
    monkeypatch.setattr("kvbench.train.recipes.head_tables.BLOCK", 7)
    torch.testing.assert_close(importance(model, examples), whole)


def test_importance_sums_to_one_and_follows_the_evidence():
    model, examples = build("llama"), examples_of()
    table = importance(model, examples)
    shares = attention_shares(model, examples)
    assert table.shape == (3, 4)
    assert float(table.sum()) == pytest.approx(1)
    torch.testing.assert_close(table.double(), shares / shares.sum(), rtol=1e-5, atol=1e-8)


def test_progress_counts_examples():
    seen = []
    importance(build("llama"), examples_of(), seen.append)
    assert seen == [1, 2]


# the built-in model


def test_the_shipped_table_can_be_made_again(model, tmp_path, capsys):
    shipped = json.loads((tiny.path() / "headkv.json").read_text())
    samples, seed = str(shipped["made"]["samples"]), str(shipped["made"]["seed"])
    arguments = ["train", "headkv", "--out", str(tmp_path), "--samples", samples, "--seed", seed, "--json", "--quiet"]
    assert main(arguments) == 0
    card = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert card["made"] | {"command": ""} == shipped["made"] | {"command": ""}
    ours, theirs = (load_file(folder / "headkv.safetensors")["importance"] for folder in (tmp_path, tiny.path()))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    again = load_weights(Weights(kind="headkv", path=str(tmp_path)), None, model.model.config, "cpu")
    assert torch.equal(again["importance"], ours)


def test_the_heads_found_on_some_problems_are_those_of_others(model):
    """The tables say something about the model: estimates from disjoint problems agree on what stands out."""
    first, second = (importance(model, tiny_examples(8, seed)).flatten() for seed in (11, 12))
    assert first.argmax() == second.argmax()
    torch.testing.assert_close(first, second, rtol=0, atol=0.05)
    assert float(first.max()) > 3 / len(first)


# the command


def test_a_folder_model_is_read_in_english(tmp_path, capsys):
    """A copy of the built-in model is not the built-in model; its byte tokens can spell anything."""
    copy = shutil.copytree(tiny.path(), tmp_path / "copy", ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    main(["train", "headkv", "--model", str(copy), "--out", str(tmp_path), "--samples", "1"])
    out = capsys.readouterr().out
    card = json.loads((tmp_path / "headkv.json").read_text())
    assert "English" in card["made"]["data"]
    assert card["base_model"] == str(copy)
    assert "query head" in out
    assert "headkv.safetensors" in out


def test_usage_errors_and_help_need_no_torch(calls, tmp_path):
    lines = [
        ["train", "--help"],
        ["train", "headvk", "--out", "x"],
        ["train", "gates", "--out", "x"],
        ["train", "duo", "--out", "x", "--samples", "0", "--seed", "-1", "--model", "./no"],
        ["train", "duo"],
    ]
    results = calls(tmp_path, [(argv, {}) for argv in lines])
    assert [result.torch for result in results] == [False] * len(lines)
    assert [result.code for result in results] == [0, 2, 2, 2, 2]
    assert "kvbench train headkv --model tiny" in results[0].out
    known = ", ".join((*sorted(BUILT_IN), *TABLES))
    assert f"cannot train 'headvk'. Did you mean 'headkv'? There are {known}." in results[1].err
    assert f"cannot train 'gates'. There are {known}." in results[2].err
    assert "--samples must be 1 or more; got 0." in results[3].err
    assert "--seed must be" in results[3].err
    assert "model folder './no' does not exist." in results[3].err
    assert not list(tmp_path.iterdir())


def test_progress_speaks_of_samples():
    from kvbench.cli.counter import Counter

    clock = iter(range(0, 1000, 20))
    lines = []

    class Stream:
        isatty = staticmethod(lambda: False)
        flush = staticmethod(lambda: None)
        write = staticmethod(lines.append)

    progress = Counter("samples", 4, stream=Stream(), clock=lambda: next(clock))
    progress._silent = False
    progress.begin(4, 0)
    progress.cell("headkv tiny")
    progress.at(1)
    assert "1/4 samples  headkv tiny" in "".join(lines)
    assert "KV" not in "".join(lines)
