"""Loads a model's tokenizer, and corrects what transformers reads wrongly in some repositories."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

TODAY = datetime(2026, 1, 1)  # the date that chat templates write: prompts must be the same on every day


def read_tokenizer(where: str, revision: str | None = None) -> Any:
    """Return the tokenizer of a model. where: the model's folder or hub name.

    Some repositories with a byte-level tokenizer.json name the class LlamaTokenizer in their configuration
    (DeepSeek-R1-Distill-Llama, deepseek-math). This class replaces the rule by which text is split, so that blanks
    vanish from prompts. Such a tokenizer is loaded as its tokenizer.json says.
    """
    import transformers

    how: dict[str, Any] = {"revision": revision, "trust_remote_code": False}
    tokenizer = transformers.AutoTokenizer.from_pretrained(where, **how)
    if "Metaspace" in _splitting(tokenizer) and _is_byte_level(where, revision):
        return transformers.PreTrainedTokenizerFast.from_pretrained(where, **how)
    return tokenizer


def _splitting(tokenizer: Any) -> str:
    """Return how a tokenizer splits text into words, as text; "" for a tokenizer outside the library `tokenizers`."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return "" if backend is None else repr(backend.pre_tokenizer)


def _is_byte_level(where: str, revision: str | None) -> bool:
    """Return whether the model's tokenizer.json splits text into bytes; False if it has no such file."""
    from transformers.utils import cached_file

    found = cached_file(
        where,
        "tokenizer.json",
        revision=revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    try:
        content = json.loads(Path(found or "").read_bytes())
        return "ByteLevel" in json.dumps(content.get("pre_tokenizer"))
    except (OSError, ValueError, AttributeError):  # transformers reports a broken file itself
        return False
