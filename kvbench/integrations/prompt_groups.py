"""The prompts of one batch in `EvictionCache`: prompts of equal length are read into one `PromptCache`.

transformers pads the prompts of a batch on the left to one length, but the cache must never hold a pad. So every
attention call is divided among the groups of equally long prompts, and each group computes its part without the pads.
With a method that has probes, each prompt forms a group alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvbench.engine.attention.interface import AttentionCall
from kvbench.engine.cache.prompt import PromptCache
from kvbench.engine.writers import BlockWriter
from kvbench.errors import UserError


@dataclass(slots=True)
class PromptGroup:
    """Equally long prompts: their indices in the batch, the number of pads before each prompt, their common cache."""

    rows: list[int]
    pads: int
    cache: PromptCache
    writer: BlockWriter

    @property
    def next_token(self) -> int:
        """The greedy next token after the group's only prompt, for probes."""
        assert self.cache.logits is not None
        return int(self.cache.logits[0].argmax())

    def of(self, call: AttentionCall) -> AttentionCall:
        """Return the part of an attention call that belongs to this group's prompts, without pads."""
        rows, first = self.rows, self.pads
        hidden = None if call.hidden is None else call.hidden[rows, first:]
        tokens = None if call.tokens is None else call.tokens[rows, first:]
        indexer = None if call.indexer is None else call.indexer.part(rows, slice(first, None))
        query, key, value = (x[rows, :, first:] for x in (call.query, call.key, call.value))
        return replace(call, query=query, key=key, value=value, hidden=hidden, tokens=tokens, indexer=indexer)


def under_autocast(call: AttentionCall) -> AttentionCall:
    """Return the call; under autocast, with queries, keys and values in autocast's dtype, in which torch's attention
    computes. Without this, a float32 model's RoPE gives float32 queries and keys, but values have autocast's dtype."""
    device = call.query.device.type
    if not torch.is_autocast_enabled(device):
        return call
    query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (call.query, call.key, call.value))
    return replace(call, query=query, key=key, value=value)


def store_logits(prompts: Sequence[PromptGroup], out: Any) -> None:
    """Store the logits after each prompt if the method has probes. out: what the model returned for the prompts; None
    if the pass failed."""
    for prompt in prompts:
        if out is not None and prompt.cache.acting.needs().probes:
            logits = out[0] if isinstance(out, tuple) else out.logits
            prompt.cache.logits = logits[prompt.rows, -1]


def attend(groups: Sequence[PromptGroup], call: AttentionCall) -> torch.Tensor:
    """Compute the attention outputs of all prompts, one group after the other. Outputs at pads are 0.

    Returns [sequences, tokens, query heads, d]. d: the dimension of a value or, with `call.latent`, the latent's rank.
    """
    [first, *others] = groups
    if not others and not first.pads:
        return first.writer(call)
    b, heads, t, _ = call.query.shape
    out = call.value.new_zeros(b, t, heads, call.value.shape[-1] if call.latent is None else call.latent.rank)
    for group in groups:
        out[group.rows, group.pads :] = group.writer(group.of(call)).to(out.device)
    return out


def pads_before(mask: torch.Tensor | None, rows: int, tokens: int) -> list[int]:
    """Return the number of pads before each prompt. mask: [b, t] attention mask, 0 at pads; None: no pads.

    Raises UserError for a mask of another shape, a pad after a prompt's first token, or a prompt of pads only.
    """
    if mask is None:
        return [0] * rows
    real = mask.bool()
    if real.shape != (rows, tokens) or not bool((real.int().diff(dim=1) >= 0).all()):
        raise UserError(
            "EvictionCache needs left-padded prompts (padding_side='left'), and an attention_mask of input_ids' shape."
        )
    counts: list[int] = real.sum(dim=1).tolist()
    if not min(counts):
        raise UserError(f"prompt {counts.index(0)} of the batch (counted from 0) has only pads; leave it out.")
    return [tokens - count for count in counts]


def check_mask(mask: Any) -> None:
    """Raise UserError unless the attention mask is a tensor [b, t] or None."""
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 2):
        raise UserError("EvictionCache takes only an attention_mask with one number per token, [sequences, tokens].")


def check_positions(given: torch.Tensor | None, own: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Raise UserError if the caller's positions differ from the cache's own, [b, t] or [3, b, t]; pads are ignored.

    For models with images, transformers may put the text's positions before the three axes ([4, b, t]); only the axes
    are compared. If `given` is for another number of tokens than `own`, nothing is checked.
    """
    given = given[-3:] if given is not None and given.dim() == 3 else given
    if given is None or given.shape[-1] != own.shape[-1]:
        return
    differ = given != own
    if bool((differ if mask is None else differ & mask.bool()).any()):
        raise UserError(
            "EvictionCache counts positions from each prompt's first token; leave out position_ids (with images: give "
            "mm_token_type_ids)."
        )


def check_tokens(name: str, value: Any) -> int:
    """Return `value` if it is a whole number of tokens, 1 or more; else raise UserError. name: the argument's name."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{name} must be a whole number of tokens, 1 or more; got {value!r}.")
    return value
