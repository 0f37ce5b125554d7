"""The weights in the package: they load with the stock classes, solve their tasks, and are those of the card."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvbench import tiny
from kvbench.taskkit.synthetic.variants import VARIANTS
from kvbench.train.tiny.evaluate import main, solve


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(tiny.path(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny.path())


@pytest.mark.parametrize("name", VARIANTS)
def test_exact_with_the_full_cache(name, model, tokenizer):
    scores = solve(model, tokenizer, VARIANTS[name], 4)
    assert [score.exact for score in scores] == [1.0] * 4
    assert [score.partial for score in scores] == [1.0] * 4


def test_the_card_speaks_of_these_weights(model):
    card = json.loads((tiny.path() / "card.json").read_text())
    assert card["sha256"] == hashlib.sha256((tiny.path() / "model.safetensors").read_bytes()).hexdigest()
    assert card["parameters"] == sum(weight.numel() for weight in model.parameters())
    assert set(card["accuracy"]) == set(VARIANTS)
    for name in VARIANTS:
        assert card["accuracy"][name]["exact"] >= 0.95


def test_config(model):
    assert model.config.model_type == "qwen3"
    assert model.config.max_position_embeddings == 32768
    assert model.generation_config.eos_token_id == model.config.eos_token_id
    assert all(weight.dtype == torch.float32 for weight in model.parameters())


TEXTS = ["Grüße, 日本語 😀", " \t\r\n  x\u00a0", "S100 S12a S7", r"\boxed{42}", "it's 3.5%", "\x00\x7f", "don 't , a ."]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip", [False, True])
def test_the_tokenizer_loses_nothing(text, skip, tokenizer):
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=skip) == text


def test_chat_template_is_the_contents_line_by_line(tokenizer):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Ask: 1?"}]
    for prompt in (False, True):
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
        assert text == "Be brief.\nAsk: 1?\n"


def test_end_and_pad(tokenizer, model):
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (model.config.eos_token_id, model.config.pad_token_id)
    assert tokenizer("a")["input_ids"] == [97], "nothing is added around a text"


def test_the_command(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["tiny_eval", "--variants", "lookup-1", "--problems", "2"])
    main()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["lookup-1"]["problems"] == 2
