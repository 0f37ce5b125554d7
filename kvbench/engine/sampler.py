"""The next token of every slot: forced by the request, or drawn independently of the batch.

token = argmax(logit / temperature + Gumbel noise), which draws exactly from the softmax; at temperature 0,
argmax(logit). The noise is a hash of (sample key, step, token id), so with equal logits the draw does not depend on
slot, neighbours, refill order, resume or device. Filters follow transformers' order: temperature, top-k, top-p, min-p;
a filter keeps or drops equal logits together.

On a CPU, noise for the whole vocabulary is slow. So with filters `draw` first draws among candidates: the `CANDIDATES`
largest logits or, with top-k, the k + `MORE` largest. If the filters drop a slot's smallest candidate, they allow no
token outside the candidates either. If they keep it, `draw` draws again for this slot, from the whole vocabulary.
"""

from __future__ import annotations

import torch

from kvbench.engine.kernels.backends import Draw
from kvbench.engine.state import Choice, State
from kvbench.eviction import noise
from kvbench.eviction.planned_device import on_gpu
from kvbench.records import Sampling

CANDIDATES = 256
MORE = 16  # candidates beyond the top k; enough unless the smallest candidate equals the k-th logit


def next_tokens(logits: torch.Tensor, state: State, kernel: Draw | None = None) -> Choice:
    """Choose the next token for every row of logits [R, V], one row per slot; an idle slot gets an arbitrary token.
    kernel: the function that draws on a GPU in place of `draw`."""
    if state.drawing.bans:
        logits = _without_ends(logits, state)
    drawn = (kernel or draw)(logits, state.keys, state.drawn, state.drawing.sampling)
    logit = logits.gather(-1, drawn[:, None]).squeeze(-1)
    bad = logit - logit != 0  # x - x is 0 if x is finite, else NaN; fewer operations than `isfinite`
    tokens = drawn
    if state.drawing.fixes:
        fixed = state.fixed.index_select(1, state.step).squeeze(1)
        tokens = torch.where(fixed < 0, drawn, fixed)
    if not state.drawing.forced:
        return Choice(tokens, bad)
    log_probs = torch.log_softmax(logits.float(), dim=-1).gather(-1, tokens[:, None]).squeeze(-1)
    return Choice(tokens, bad, log_probs, logits.argmax(dim=-1) == tokens)


def _without_ends(logits: torch.Tensor, state: State) -> torch.Tensor:
    """Return the logits, with -inf for the end tokens of each slot whose answer may not end yet."""
    known = (state.ends >= 0) & (state.ends < logits.shape[1])
    banned = torch.where((state.early[:, None] > 0) & known, state.ends, logits.shape[1])
    padded = torch.nn.functional.pad(logits, (0, 1))  # a further logit, cut off below, for tokens that are not banned
    return padded.scatter_(1, banned, float("-inf"))[:, :-1]


def draw(logits: torch.Tensor, keys: torch.Tensor, steps: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Draw the next token for every row of logits.

    logits: [R, V]; keys, steps: [R] int64, the sample's noise key and the number of tokens it has drawn before. Returns
    [R] int64 token ids. A row with NaN logits yields the id of a NaN logit; the caller must check for it.
    """
    if sampling.temperature == 0:
        return logits.max(dim=-1).indices  # the first of equal logits as `argmax`, and faster on a CPU in bfloat16
    vocabulary = logits.shape[-1]
    scaled = logits.float() / sampling.temperature
    filters = sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0
    count = min(vocabulary, sampling.top_k + MORE if sampling.top_k else CANDIDATES)
    if not filters or on_gpu(logits):  # on CUDA the host would have to wait to learn where to draw again
        count = vocabulary
    tokens, covered = _draw(scaled, keys, steps, sampling, count)
    rest = (~covered).nonzero().squeeze(-1) if count < vocabulary else covered[:0]
    if rest.numel():  # flat distributions: the filters allow all candidates
        tokens[rest] = _draw(scaled[rest], keys[rest], steps[rest], sampling, vocabulary)[0]
    return tokens


def _draw(
    scaled: torch.Tensor, keys: torch.Tensor, steps: torch.Tensor, sampling: Sampling, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw among the `count` largest logits. Return the tokens [R], and [R] bool: whether these logits suffice. They
    suffice if the filters drop the smallest of them: then no other token is allowed."""
    values, ids = scaled.topk(count, dim=-1)  # descending
    kept = torch.ones_like(values, dtype=torch.bool)
    if 0 < sampling.top_k < count:
        kept = values >= values[:, sampling.top_k - 1, None]
    if sampling.top_k:  # probabilities are renormalised over the top k, as transformers does
        probabilities = torch.softmax(values.masked_fill(~kept, float("-inf")), dim=-1)
    else:
        probabilities = torch.exp(values - torch.logsumexp(scaled, dim=-1, keepdim=True))
    before = probabilities.cumsum(dim=-1) - probabilities
    kept &= (before < sampling.top_p) & (probabilities >= sampling.min_p * probabilities[:, :1])
    kept[:, 0] = True
    allowed = values >= values.masked_fill(~kept, float("inf")).amin(dim=-1, keepdim=True)
    covered = ~allowed[:, -1]
    bits = noise.mix(keys[:, None], steps[:, None], ids)
    gumbel = -torch.log(-torch.log(noise.uniform(bits)))
    choice = torch.where(allowed, values.double() + gumbel, float("-inf")).argmax(dim=-1, keepdim=True)
    choice = torch.where(torch.isnan(values[:, :1]), 0, choice)  # topk puts NaN first
    return ids.gather(-1, choice).squeeze(-1), covered
