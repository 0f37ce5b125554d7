"""Checks that a model has at least as many embeddings as tokens: a token without an embedding would crash a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvbench.errors import SetupError, UserError, quote
from kvbench.store.strict_json import lenient


def check(tokens: int | None, embeddings: int | None) -> None:
    """Raise SetupError if there are more tokens than embeddings. None stands for an unknown number; nothing is checked
    then."""
    if tokens is not None and embeddings is not None and tokens > embeddings:
        raise SetupError(
            f"the tokenizer has {tokens} tokens and the model {embeddings} embeddings; they do not belong together. "
            "Put the model's own tokenizer files beside its weights."
        )


def check_tokenizer(tokenizer: Any, embeddings: int | None) -> None:
    """Raise SetupError if a tokenizer has more tokens than the model has embeddings, apart from special tokens.

    Special tokens without an embedding are accepted, because no text needs to hold them: the text models of Gemma 3
    share a tokenizer with an image token. `check_ids` refuses texts that hold them.
    """
    if embeddings is not None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).items()
        check(len(tokenizer) - sum(token.special and i >= embeddings for i, token in added), embeddings)


def check_ids(what: str, tokenizer: Any, ids: Iterable[int], embeddings: int | None) -> None:
    """Raise UserError if a token has no embedding. what: the text of these tokens, for the message. tokenizer: None if
    there is none. embeddings: number of the model's embeddings; None: unknown, nothing is checked."""
    if embeddings is not None and (largest := max(ids, default=0)) >= embeddings:
        token = largest if tokenizer is None else tokenizer.decode([largest])
        raise UserError(
            f"{what} holds the token {quote(token)}, for which the model has no embedding. Put the model's own "
            "tokenizer files beside its weights, or leave the token out of the questions."
        )


def end_ids(tokenizer: Any, generation: Any, config: Any, file: Mapping[str, Any] | None = None) -> frozenset[int]:
    """Return the ids of all end tokens that the tokenizer, the generation config and the configuration name.

    The configuration's ids count if config.json states them, or if the generation config names none. Otherwise they
    are the default of the configuration's class (2 for Llama), which may be any token of this model.

    tokenizer, generation: None if there is none. config: the text part of transformers' configuration. file: the
    content of config.json; None: it is unknown, and the configuration's ids count.

    Raises SetupError if an id is no integer.
    """
    others = _end_ids(generation)
    stated = file is None or "eos_token_id" in (file.get("text_config") or file)
    return _end_ids(tokenizer) | others | (_end_ids(config) if stated or not others else frozenset())


def _end_ids(owner: Any) -> frozenset[int]:
    named = getattr(owner, "eos_token_id", None)
    ids = named if isinstance(named, (list, tuple)) else [] if named is None else [named]
    if any(type(i) is not int for i in ids):
        raise SetupError(
            f"eos_token_id of the model is {quote(str(named))}; it must be a whole number or a list of them."
        )
    return frozenset(ids)


def check_folder(folder: Path, config: Mapping[str, Any]) -> None:
    """Check that a model folder's tokenizer.json has no more tokens than its config.json has embeddings (vocab_size).
    As in `check_tokenizer`, special tokens are accepted. Raises SetupError. If one of the files does not state its
    number, nothing is checked."""
    size = (config.get("text_config") or config).get("vocab_size")
    if type(size) is int:
        check(tokens(folder, size), size)


def tokens(folder: Path, size: int) -> int | None:
    """Return the number of tokens in a folder's tokenizer.json; None if it cannot be read. Special tokens with ids from
    `size` on do not count."""
    try:
        content = lenient((folder / "tokenizer.json").read_bytes())
        known, added = content["model"]["vocab"], content.get("added_tokens") or []
        names = set(known) if isinstance(known, dict) else {piece for piece, _ in known}
        extra = {token["content"] for token in added if token["special"] and token["id"] >= size}
        return len((names | {token["content"] for token in added}) - extra)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # transformers reports a broken file itself
        return None
