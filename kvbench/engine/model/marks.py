"""Finds the tokens of a vocabulary that consist of white space and given characters, such as separators."""

from __future__ import annotations

import torch

from kvbench.engine.model.load import LoadedModel
from kvbench.errors import UserError


def marks(loaded: LoadedModel, characters: str) -> torch.Tensor:
    """Return which tokens consist only of `characters` and white space, [V] bool, on the model's device.

    The result is True also for tokens of white space alone, and False for special tokens. Raises UserError if the model
    has no tokenizer, or if the result is False for all tokens other than white space.
    """
    tokenizer, size = loaded.tokenizer, loaded.model.get_input_embeddings().weight.shape[0]
    if tokenizer is None:
        raise UserError(
            f"the method looks for tokens of the characters {characters!r} and needs the model's tokenizer; pass it as "
            "`tokenizer`."
        )
    texts = tokenizer.batch_decode([[token] for token in range(min(size, len(tokenizer)))])
    special = set(tokenizer.all_special_ids)
    found = [
        i for i, text in enumerate(texts) if text and i not in special and not "".join(text.split()).strip(characters)
    ]
    if not any(set(texts[i]) & set(characters) for i in found):
        raise UserError(
            f"no token of the model's tokenizer consists of the characters {characters!r}, which the method looks for. "
            "Use another method, or other characters."
        )
    table = torch.zeros(size, dtype=torch.bool)
    table[found] = True
    return table.to(loaded.device)
