"""Built-in recipes with other defaults, for tests that must stay small; a stand-in for a model that spells; and the
slow way to logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvbench.registry import recipes
from kvbench.train.catalogue import entry_of
from kvbench.train.entry import FLAGS, Entry
from kvbench.train.forward import forward
from kvbench.train.sparse_masks import SparseAttention
from kvbench.train.sparse_pass import Part


def change(patch: pytest.MonkeyPatch, name: str, **changes: Any) -> Entry:
    """Give a registered recipe other defaults until the patch is undone; return its new entry."""
    entry = replace(entry_of(name), **changes)
    patch.setitem(recipes._members, name, entry)
    return entry


def options_of(entry: Entry, model: str = "tiny", preset: str | None = None) -> dict[str, Any]:
    """The settings that `prepare` takes as options: those without flags of their own."""
    return {name: value for name, value in entry.settings(model, preset).items() if name not in FLAGS}


def speller(context: int, start: int | None = None) -> Any:
    """A stand-in with the parts of a model that `text_examples` and `passkey_examples` use: a tokenizer with a token a
    character, `start` before every text."""

    def tokenizer(text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    tokenizer.bos_token_id = start
    return SimpleNamespace(tokenizer=tokenizer, context=context)


def logits_at_once(part: Part, model: Any, until: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """The logits [b, n, V] of all targets of a micro-batch, in float32: the slow way, which takes much memory."""
    return forward(model, SparseAttention(until), input_ids=part.ids[:, :-1], logits=part.targets.shape[1]).float()
