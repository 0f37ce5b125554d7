"""A few steps of every recipe on small random models of real architectures, loaded, asked and served as a user would.

An untrained model answers nothing rightly. A judge that throws a coin for each text stands in for the right one where
a recipe must know what is right.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.methods import small
from support.recipes import change, options_of
from tokenizers import Tokenizer, models, pre_tokenizers

from kvbench import registry
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import load
from kvbench.engine.model.weights import Base, save_weights
from kvbench.eviction.terms.foresight import scorer_shapes
from kvbench.records import Request
from kvbench.train import head_data, traces
from kvbench.train import prepare as recipes
from kvbench.train.catalogue import BUILT_IN
from kvbench.train.loop import LOG, train

QUESTIONS = [f"{who} {what} {when} What did {who.lower()} do ?" for who in head_data.SUBJECTS for what in
             head_data.ACTIONS for when in head_data.ENDINGS]  # fmt: skip
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", dict(num_attention_heads=8, num_key_value_heads=2, head_dim=16)),
    "llama": ("Llama", dict(num_attention_heads=8, num_key_value_heads=2)),
    "llama-mha": ("Llama", dict(num_attention_heads=4, num_key_value_heads=4)),
}
GKV = {"method": "gkv(window=4)", "budget": 24, "interval": 8, "max_tokens": 24, "slots": 4, "micro": 2}
# What makes a recipe small. One that is not named here runs with its defaults.
SMALL: dict[str, dict[str, Any]] = {
    "lookaheadkv": {"rows": 3, "rank": 2, "budget": 8, "max_tokens": 24},
    "trimkv": {"width": 8, "budget": 24, "interval": 8, "max_tokens": 24},
    "retention": {"width": 8, "budget": 24, "interval": 8, "max_tokens": 24},
    "duo": {"sinks": 4, "recent": 16, "tokens": 450},
    "foresightkv": {"budget": 24, "interval": 8, "hidden": 4, "max_tokens": 24},
    "foresightkv-grpo": {"budget": 24, "interval": 8, "group": 2, "reward": "all", "max_tokens": 24},
    "gkv-distill": GKV,
    "gkv-rl": GKV | {"max_tokens": 40, "group": 6, "temperature": 2.0},
    "kvzap": {"tokens": 200, "width": 16},
    "locret": {"tokens": 200, "width": 16, "max_tokens": 24},
}


@pytest.fixture(scope="module")
def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Every word of the questions and of the texts with codes, and digits one by one."""
    cut = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)])
    said = " ".join([*QUESTIONS, *head_data.PLACES, "Remember the codes in these notes. Question: What are Answer: is"])
    words = sorted({word for word, _ in cut.pre_tokenize_str(said)} | set("0123456789"))
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["<unk>", "<s>", "</s>", *words])}, "<unk>"))
    core.pre_tokenizer = cut
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    made.chat_template = "{{ bos_token }}{% for m in messages %}{{ m['content'] + ' Answer : ' }}{% endfor %}"
    return made


@pytest.fixture(scope="module", params=SHAPES)
def folder(request, tokenizer, tmp_path_factory) -> Path:
    """A model as `save_pretrained` leaves it, hidden size and depth cut down."""
    name, heads = SHAPES[request.param]
    config = getattr(transformers, f"{name}Config")(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        max_position_embeddings=1024,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **heads,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(3)  # attention that is far from uniform
        model.get_output_embeddings().weight[config.eos_token_id] = 0  # an end is seldom, and never the likeliest token
    made = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


@pytest.fixture
def prepared(folder, tmp_path, monkeypatch):
    """prepared(name): a recipe by the way that the command takes, with questions of a file."""
    monkeypatch.setattr(traces, "judge", lambda *known: lambda text: zlib.crc32(text.encode()) % 2 == 0)

    def prepare(name: str) -> recipes.Ready:
        entry = change(monkeypatch, name, held_out=2)
        options = options_of(entry, str(folder)) | SMALL.get(name, {})
        if name == "foresightkv-grpo":  # goes on from a scorer
            options["init"] = _random_scorer(folder, tmp_path, options["features"])
        data = tmp_path / "questions.jsonl"
        judged = entry.learns_from == "questions" or entry.tested_on == "questions"
        rows = [{"question": q} | ({"answer": "1"} if judged else {}) for q in QUESTIONS[:12]]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return recipes.prepare(
            name,
            str(folder),
            data=None if entry.learns_from == "examples" else str(data),
            samples=10,
            steps=2,
            lr=1e-3,
            batch=2,
            seed=0,
            options=options,
            device="cpu",
            out=tmp_path,
        )

    return prepare


def _random_scorer(folder: Path, out: Path, features: str) -> str:
    loaded = load(str(folder), device="cpu")
    config = loaded.model.config
    shapes = scorer_shapes(features, json.loads(config.to_json_string()), 4)
    tensors = {name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for name, shape in shapes.items()}
    path = out / "init" / "foresightkv.safetensors"
    path.parent.mkdir()
    save_weights(path, "foresightkv", tensors, Base(name=str(folder), config=config), made={})
    return str(path)


@pytest.mark.parametrize("name", BUILT_IN)
def test_two_steps_on_a_real_shape(name, prepared, folder, tmp_path):
    ready = prepared(name)
    recipe, config = ready.recipe, ready.loaded.model.config
    before = {key: p.detach().clone() for key, p in recipe.parameters().items()}
    done = train(recipe, tmp_path, base=Base(name=str(folder), config=config), revision=ready.revision)
    rows = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert rows[0]["grad_norm"] > 0
    assert any(not torch.equal(before[key], p) for key, p in recipe.parameters().items())
    assert all(bool(p.isfinite().all()) for p in recipe.parameters().values())
    assert done.card["model"]["num_key_value_heads"] == config.num_key_value_heads

    # What came out serves, beside the model as a user would put it.
    if recipe.kind == "model":
        served, method = load(str(done.path), device="cpu"), registry.methods.get("full")()
    else:
        for suffix in (".safetensors", ".json"):
            (folder / done.path.with_suffix(suffix).name).write_bytes(done.path.with_suffix(suffix).read_bytes())
        served = load(str(folder), device="cpu")
        method = small(recipe.kind)
    budget = None if recipe.kind == "model" else 20
    engine = Engine(served, method, budget=budget, interval=8, slots=1, max_tokens=80)
    ids = tuple(served.tokenizer(QUESTIONS[0])["input_ids"] * 2)
    [answer] = engine.generate([Request(task="t", doc_id="d", prompt_ids=ids, max_new_tokens=16)])
    assert answer.status == "ok"
    assert len(answer.token_ids) == 16
