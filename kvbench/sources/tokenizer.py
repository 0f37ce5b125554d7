"""Loads a model's tokenizer, and corrects what transformers reads wrongly in some repositories."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

THINKING_TAGS = ("think", "seed:think")  # names of the tags around thinking blocks; seed: those of Seed-OSS
TODAY = datetime(2026, 1, 1)  # the date that chat templates write: prompts must be the same on every day
# Model types that have repositories with a wrong rule for splitting text, as transformers lists them.
MISTRAL = frozenset({"mistral", "mistral3", "ministral", "pixtral", "voxtral"})
THREE_DIGITS = "p{N}{1,3}"  # a part of the wrong rule, which keeps up to three digits together


def read_tokenizer(where: str, revision: str | None = None) -> Any:
    """Return the tokenizer of a model. where: the model's folder or hub name.

    Some repositories with a byte-level tokenizer.json name the class LlamaTokenizer in their configuration
    (DeepSeek-R1-Distill-Llama, deepseek-math). This class replaces the rule by which text is split, so that blanks
    vanish from prompts. Such a tokenizer is loaded as its tokenizer.json says.

    Some repositories of Mistral's models (Mistral Small 3.1) have a tokenizer.json that splits text by the rule of
    other models. transformers knows the right rule, but applies it only on request.

    If the package mistral_common is installed, transformers reads a repository with tekken.json as a tokenizer without
    the repository's chat template and without the methods that kvbench calls. Prompts must not depend on installed
    packages, so transformers' own tokenizer is used.
    """
    import transformers

    how: dict[str, Any] = {"revision": revision, "trust_remote_code": False}
    kind: Any = transformers.AutoTokenizer
    tokenizer = kind.from_pretrained(where, mistral_format=False, **how)
    if "Metaspace" in _splitting(tokenizer) and "ByteLevel" in _splitting_of_file(where, revision):
        kind = transformers.PreTrainedTokenizerFast
        tokenizer = kind.from_pretrained(where, **how)
    if _splits_by_a_foreign_rule(tokenizer, where, revision):
        # The folder, also of a hub model: only for a folder does transformers decide by the configuration.
        folder = str(_file(where, "tokenizer.json", revision).parent)
        return kind.from_pretrained(folder, trust_remote_code=False, fix_mistral_regex=True)
    return tokenizer


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the text of token ids without special tokens. The tags of thinking blocks stay, because scorers search the
    text for them; some fine-tuned models mark these tags as special tokens."""
    hidden = hidden_tokens(tokenizer)
    if len(hidden) == len(_special_tokens(tokenizer)):  # no tag is special
        return str(tokenizer.decode(ids, skip_special_tokens=True))
    return str(tokenizer.decode([i for i in ids if i not in hidden], skip_special_tokens=False))


@functools.lru_cache(maxsize=4)
def hidden_tokens(tokenizer: Any) -> Mapping[int, str]:
    """Return the special tokens that `decode` leaves out: {id: text}."""
    tags = {f"<{slash}{name}>" for name in THINKING_TAGS for slash in ("", "/")}
    return {i: text for i, text in _special_tokens(tokenizer).items() if text not in tags}


@functools.lru_cache(maxsize=4)
def _special_tokens(tokenizer: Any) -> Mapping[int, str]:
    """Return all special tokens of a tokenizer: {id: text}. Some added tokens are special, but not in
    `all_special_tokens`."""
    named = zip(getattr(tokenizer, "all_special_ids", ()), getattr(tokenizer, "all_special_tokens", ()), strict=True)
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return dict(named) | {i: str(token) for i, token in added.items() if token.special}


def _splitting(tokenizer: Any) -> str:
    """Return how a tokenizer splits text into words, as text; "" for a tokenizer outside the library `tokenizers`."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return "" if backend is None else repr(backend.pre_tokenizer)


def _splitting_of_file(where: str, revision: str | None) -> str:
    """Return how the model's tokenizer.json splits text into words, as text; "" if it does not say."""
    return json.dumps(_read(_file(where, "tokenizer.json", revision)).get("pre_tokenizer", ""))


def _splits_by_a_foreign_rule(tokenizer: Any, where: str, revision: str | None) -> bool:
    """Return whether the tokenizer of a Mistral model keeps digits together, although its vocabulary has no token of
    two digits. Other models of Mistral's architecture have vocabularies that fit this rule."""
    if _read(_file(where, "config.json", revision)).get("model_type") not in MISTRAL:
        return False
    return THREE_DIGITS in _splitting_of_file(where, revision) and "10" not in tokenizer.get_vocab()


def _file(where: str, name: str, revision: str | None) -> Path:
    """Return the path of a file of the model; a path without a file if the model has no such file."""
    from transformers.utils import cached_file

    found = cached_file(
        where,
        name,
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return Path(found or Path(where, name))


def _read(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file; {} if there is none, or a broken one, which transformers reports itself."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
