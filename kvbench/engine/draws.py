"""The next token of every slot: drawn by the sampler, or forced by the request."""

from __future__ import annotations

from collections.abc import Collection

import torch

from kvbench.engine.sampler import draw
from kvbench.engine.sequence import Sequence
from kvbench.records import Sampling


def next_tokens(
    logits: torch.Tensor, rows: Collection[Sequence | None], sampling: Sampling, stop_ids: Collection[int]
) -> tuple[list[int], list[bool]]:
    """Return the next token per row of logits [R, V], and whether that token's logit is NaN or infinite.

    Rows without a sequence get an arbitrary token. stop_ids: end tokens of the model.
    """
    device = logits.device
    held = [(i, s) for i, s in enumerate(rows) if s and len(s.tokens) < s.request.min_new_tokens and not s.pending]
    if held:
        logits = logits.clone()
        for i, early in held:
            logits[i, [*stop_ids, *early.request.stop_ids]] = float("-inf")
    keys = torch.tensor([s.key if s else 0 for s in rows], device=device)
    steps = torch.tensor([s.drawn if s else 0 for s in rows], device=device)
    drawn = draw(logits, keys, steps, sampling)
    bad = (~torch.isfinite(logits.gather(-1, drawn[:, None]))).squeeze(-1).tolist()
    tokens: list[int] = drawn.tolist()
    for i, sequence in enumerate(rows):
        if sequence and sequence.request.forced:
            best, token = int(logits[i].argmax()), sequence.request.forced[len(sequence.tokens)]
            sequence.log_probs.append(float(torch.log_softmax(logits[i].float(), dim=-1)[token]))
            sequence.likeliest &= best == token
            tokens[i] = token
    return tokens, bad
