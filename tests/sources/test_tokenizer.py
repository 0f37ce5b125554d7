"""Tokenizers that transformers reads wrongly, and tokenizers with more tokens than the model has embeddings."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from support.chat_templates import SWITCH, tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from kvbench.errors import SetupError, UserError
from kvbench.sources import vocabulary
from kvbench.sources.tokenizer import THINKING_TAGS, decode, read_tokenizer
from kvbench.taskkit.reader import special_stops

LLAMA3 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MANY = 100_001  # transformers expects the wrong rule only in tokenizers with more than 100,000 tokens


def folder(path: Path, tokenizer_class: str, model_type: str = "llama", **config: Any) -> Path:
    """Save a byte-level tokenizer under the name of another class, as some repositories do."""
    tokenizer(SWITCH).save_pretrained(path)
    settings = path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": tokenizer_class}))
    (path / "config.json").write_text(json.dumps({"model_type": model_type, **config}))
    return path


@pytest.mark.parametrize("name", ["LlamaTokenizerFast", "LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_blanks_survive_whatever_class_a_repository_names(tmp_path: Path, name: str) -> None:
    made = read_tokenizer(str(folder(tmp_path, name)))
    assert made.decode(made("a b  c", add_special_tokens=False)["input_ids"]) == "a b  c"
    assert made.chat_template == SWITCH


def test_transformers_alone_loses_the_blanks(tmp_path: Path) -> None:
    """Otherwise `read_tokenizer` needs no correction any more."""
    made = transformers.AutoTokenizer.from_pretrained(folder(tmp_path, "LlamaTokenizerFast"))
    assert made.decode(made("a b", add_special_tokens=False)["input_ids"]) == "ab"


@pytest.mark.parametrize(
    ("model_type", "tokenizer_class", "tokens", "words"),
    [
        ("mistral", "LlamaTokenizer", [], ["hello", "World"]),
        ("mistral3", "PreTrainedTokenizerFast", [], ["hello", "World"]),
        ("mistral", "LlamaTokenizerFast", ["10"], ["helloWorld"]),  # a vocabulary made with the rule of Llama 3
        ("qwen2", "PreTrainedTokenizerFast", [], ["helloWorld"]),
    ],
)
def test_mistral_models_split_text_by_their_own_rule(
    tmp_path: Path, model_type: str, tokenizer_class: str, tokens: list[str], words: list[str]
) -> None:
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *tokens, *(f"<{i}>" for i in range(MANY))]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=[]))
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    core.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    core.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<0>").save_pretrained(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": tokenizer_class}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "transformers_version": "4.50.0"}))
    made = read_tokenizer(str(tmp_path))
    assert [word for word, _ in made.backend_tokenizer.pre_tokenizer.pre_tokenize_str("helloWorld")] == words
    assert made.decode(made("a b  10", add_special_tokens=False)["input_ids"]) == "a b  10"


def test_a_tekken_file_changes_nothing_where_mistral_common_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the package, transformers would read tekken.json, and the chat template would be lost."""
    auto, mistral = (
        f"transformers.{name}" for name in ("models.auto.tokenization_auto", "integrations.mistral.tokenizer")
    )
    monkeypatch.setitem(import_module(auto).TOKENIZER_MAPPING_NAMES, "mistral3", "MistralCommonBackend")
    monkeypatch.setattr(f"{mistral}.is_mistral_common_available", lambda: True)
    where = folder(tmp_path, "TokenizersBackend", "mistral3")
    (tmp_path / "tekken.json").write_text("{}")
    made = read_tokenizer(str(where))
    assert made.chat_template == SWITCH
    assert made.decode(made("a b", add_special_tokens=False)["input_ids"]) == "a b"


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("tag", THINKING_TAGS)
def test_decoded_text_keeps_the_tags_of_thinking_blocks(tag: str, special: bool) -> None:
    """A fine-tuning script may have added them as special tokens, which transformers leaves out of the text."""
    made = tokenizer(SWITCH)
    tags = [AddedToken(f"<{slash}{tag}>", special=special, normalized=False) for slash in ("", "/")]
    made.add_tokens(tags, special_tokens=special)
    made.add_tokens([AddedToken("<|turn|>", special=True)], special_tokens=True)
    ids = made(f"<{tag}> a  b\n</{tag}>\n\nPaßt<|turn|><s>", add_special_tokens=False)["input_ids"]
    assert decode(made, ids) == f"<{tag}> a  b\n</{tag}>\n\nPaßt"
    assert (f"</{tag}>" not in made.decode(ids, skip_special_tokens=True)) is special
    assert special_stops([f"</{tag}>", "<|turn|>"], made) == ((f"</{tag}>",), ("<|turn|>",))


def with_image_token(path: Path) -> tuple[Any, int]:
    """Return a tokenizer with a special token behind its vocabulary, and the number of its other tokens."""
    made = tokenizer(SWITCH)
    size = len(made)
    made.add_special_tokens({"additional_special_tokens": ["<image_soft_token>"]})
    made.save_pretrained(path)
    return made, size


def test_a_special_token_needs_no_embedding(tmp_path: Path) -> None:
    """The text models of Gemma 3 have one embedding fewer than their tokenizer has tokens."""
    made, size = with_image_token(tmp_path)
    vocabulary.check_tokenizer(made, size)
    vocabulary.check_folder(tmp_path, {"vocab_size": size})
    for wrong in (
        lambda: vocabulary.check_tokenizer(made, size - 1),
        lambda: vocabulary.check_folder(tmp_path, {"vocab_size": size - 1}),
    ):
        with pytest.raises(SetupError, match="they do not belong together"):
            wrong()
    made.add_tokens(["plain"])
    with pytest.raises(SetupError, match="they do not belong together"):
        vocabulary.check_tokenizer(made, size)


def test_a_text_with_a_token_without_embedding_is_refused(tmp_path: Path) -> None:
    made, size = with_image_token(tmp_path)
    for fine in ([1, size - 1], []):
        vocabulary.check_ids("a text", made, fine, size)
    vocabulary.check_ids("a text", made, [size], None)
    with pytest.raises(UserError, match=r"^a text holds the token '<image_soft_token>', for which"):
        vocabulary.check_ids("a text", made, made("a <image_soft_token>")["input_ids"], size)
    with pytest.raises(UserError, match=rf"^a text holds the token '{size}', for which"):
        vocabulary.check_ids("a text", None, [size], size)


def test_a_tokenizer_without_added_tokens_is_counted() -> None:
    class Plain(SimpleNamespace):
        def __len__(self) -> int:
            return 9

    vocabulary.check_tokenizer(Plain(), 9)
    with pytest.raises(SetupError):
        vocabulary.check_tokenizer(Plain(), 8)
