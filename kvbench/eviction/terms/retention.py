"""Geometric decay by a retention beta: scores of entries, and attention and occupancy under soft eviction.

Evictions use the scores; training of gates uses soft eviction, in which entries fade instead of being dropped. Scores
and soft eviction come from TRIM-KV (arXiv 2512.03324) and global retention (arXiv 2605.09649). All formulas use log
beta: with beta near 1 and ages of thousands, powers of beta would lose precision.
"""

from __future__ import annotations

import math
from typing import Literal

from kvbench.lazy import torch

Form = Literal["weight", "scale"]
LARGEST = -1e-9  # largest log beta: at beta = 1 the closed form below is 0 / 0


def log_gain(log_beta: torch.Tensor, age: torch.Tensor, horizon: int = 1) -> torch.Tensor:
    """Return log G of entries: the logarithm of their retention summed over the next n = `horizon` queries.

        G = sum over k = 1 .. n of beta^(age + k - 1) = beta^age (1 - beta^n) / (1 - beta)

    log_beta: below 0, any shape. age: number of positions from the entry to the next query, t + 1 - p for an entry at
    position p and the newest token at t; it must broadcast with log_beta. With horizon 1, log G is age * log beta,
    TRIM-KV's score.
    """
    if horizon == 1:
        return age * log_beta
    small = log_beta.clamp_max(LARGEST)
    return age * log_beta + _log1mexp(horizon * small) - _log1mexp(small)


def _log1mexp(x: torch.Tensor) -> torch.Tensor:
    """Return log(1 - e^x) for x < 0, by the one of two formulas that is more precise at x."""
    return torch.where(x < math.log(0.5), torch.log1p(-x.exp()), (-torch.expm1(x)).log())


def decay(log_beta: torch.Tensor) -> torch.Tensor:
    """Return decay factors [..., n, n] for log beta [..., n]: beta_j^(i - j) where i >= j, 0 above the diagonal."""
    n = log_beta.shape[-1]
    age = torch.arange(n, device=log_beta.device)
    age = age[:, None] - age
    return (log_beta[..., None, :] * age.clamp_min(0)).exp().masked_fill(age < 0, 0.0)


def occupancy(log_beta: torch.Tensor, block: int = 256) -> torch.Tensor:
    """Return the sum of the entries' decays at each time t, [..., n]: the sum over i <= t of beta_i^(t - i).

    The capacity loss is the excess of this sum over a budget. To bound memory, times are processed in blocks of
    `block`; with more than one block, the backward pass computes each block again.
    """
    n = log_beta.shape[-1]
    times = torch.arange(n, device=log_beta.device)

    def part(start: int, end: int) -> torch.Tensor:
        age = times[start:end, None] - times[:end]
        return (log_beta[..., None, :end] * age.clamp_min(0)).exp().masked_fill(age < 0, 0.0).sum(dim=-1)

    if n <= block:
        return part(0, n)
    again = torch.utils.checkpoint.checkpoint
    blocks = [(start, min(start + block, n)) for start in range(0, n, block)]
    return torch.cat([again(part, *of, use_reentrant=False) for of in blocks], dim=-1)


def gated_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    log_beta: torch.Tensor,
    *,
    scaling: float,
    form: Form = "weight",
    first: int = 0,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return causal attention in which entries fade instead of being evicted.

    `form` says how entry j fades for query i:

        weight   softmax weights proportional to beta_j^(i - j) exp(q_i k_j); beta -> 0 is an eviction
        scale    logits beta_j^(i - j) q_i k_j, as TRIM-KV's paper prints it and its eager code computes it

    Args:
        queries: [b, Hq, t, d] of the tokens from `first` on; keys, values: [b, Hk, n, d]; log_beta: [b, Hk, n].
        softcap: the model's logit cap (tanh).
        sinks: [Hq] the model's sink logits: each acts as the logit of one more key, which has no value.

    Returns [b, Hq, t, dv], in the type of the values.
    """
    b, heads, t, d = queries.shape
    group = heads // keys.shape[1]
    grouped = queries.float().reshape(b, keys.shape[1], group, t, d)
    logits = grouped @ keys.float()[:, :, None].transpose(-1, -2) * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    times = torch.arange(max(first + t, keys.shape[2]), device=queries.device)
    age = times[first : first + t, None] - times[: keys.shape[2]]
    faded = log_beta.float()[:, :, None, None, :] * age.clamp_min(0)  # [b, Hk, 1, t, n]
    logits = logits + faded if form == "weight" else logits * faded.exp()
    logits = logits.masked_fill(age < 0, float("-inf"))
    if sinks is not None:  # one more logit in the denominator
        row = sinks.float().view(1, -1, group, 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, row], dim=-1)
    weights = logits.softmax(dim=-1)[..., : keys.shape[2]]
    return (weights @ values.float()[:, :, None]).view(b, heads, t, -1).to(values.dtype)
