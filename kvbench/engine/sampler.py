"""The next token of every slot: forced by the request, or drawn independently of the batch.

token = argmax(logit / temperature + Gumbel noise), which draws exactly from the softmax. The noise is a hash of (sample
key, step, token id), so the draw does not depend on slot, neighbours, refill order, resume or device. Filters follow
transformers' order: temperature, top-k, top-p, min-p. Only candidates are hashed: the top k, or the `CANDIDATES`
largest logits when top-p or min-p is certain to cut among them; otherwise the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from kvbench.engine.sequence import Sequence
from kvbench.eviction import noise
from kvbench.records import Sampling

CANDIDATES = 256


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


def draw(logits: torch.Tensor, keys: torch.Tensor, steps: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Draw the next token of every row.

    logits: [R, V]; keys, steps: [R] int64, the sample's noise key and the number of tokens it has drawn before. Returns
    [R] int64 token ids. A row with NaN logits yields the id of a NaN logit; the caller must check for it.
    """
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    vocabulary = logits.shape[-1]
    scaled = logits.float() / sampling.temperature
    filters = sampling.top_p < 1 or sampling.min_p > 0
    if sampling.top_k:
        return _draw(scaled, keys, steps, sampling, min(sampling.top_k, vocabulary))[0]
    if not filters or vocabulary <= CANDIDATES:
        return _draw(scaled, keys, steps, sampling, vocabulary)[0]
    tokens, covered = _draw(scaled, keys, steps, sampling, CANDIDATES)
    rest = (~covered).nonzero().squeeze(-1)  # flat distributions: top-p or min-p cuts beyond the candidates
    if rest.numel():
        tokens[rest] = _draw(scaled[rest], keys[rest], steps[rest], sampling, vocabulary)[0]
    return tokens


def _draw(
    scaled: torch.Tensor, keys: torch.Tensor, steps: torch.Tensor, sampling: Sampling, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw among the `count` largest logits. Also return per row whether the filters cut among these."""
    values, ids = scaled.topk(count, dim=-1)  # descending
    if sampling.top_k:  # probabilities are renormalised over the top k, as transformers does
        probabilities = torch.softmax(values, dim=-1)
    else:
        probabilities = torch.exp(values - torch.logsumexp(scaled, dim=-1, keepdim=True))
    before = probabilities.cumsum(dim=-1) - probabilities
    allowed = (before < sampling.top_p) & (probabilities >= sampling.min_p * probabilities[:, :1])
    allowed[:, 0] = True
    covered = ~allowed[:, -1] if count < scaled.shape[-1] else torch.ones_like(allowed[:, -1])
    bits = noise.mix(keys[:, None], steps[:, None], ids)
    gumbel = -torch.log(-torch.log(noise.uniform(bits)))
    choice = torch.where(allowed, values.double() + gumbel, float("-inf")).argmax(dim=-1, keepdim=True)
    choice = torch.where(torch.isnan(values[:, :1]), 0, choice)  # topk puts NaN first
    return ids.gather(-1, choice).squeeze(-1), covered
