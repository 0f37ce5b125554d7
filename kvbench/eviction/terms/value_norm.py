"""How much a value can change the hidden state: its norm after the layer's output projection (arXiv 2502.03805)."""

from __future__ import annotations

from kvbench.eviction.columns import GivenColumn
from kvbench.eviction.new_tokens import NewTokens
from kvbench.lazy import torch

VALUE_NORM = GivenColumn(name="value_norm")
PRODUCT_FLOATS = 1 << 22  # of one product of a sequence, at most


def shares(norms: torch.Tensor, dim: int) -> torch.Tensor:
    """Return norms divided by their sum along the axis `dim`; where all norms are 0, they stay 0."""
    return norms / norms.sum(dim=dim, keepdim=True).clamp_min(torch.finfo(norms.dtype).tiny)


def projected_norms(new: NewTokens) -> torch.Tensor:
    """Return the L1 norms of v W_O^h, averaged over the query heads h of each KV head's group, [b, Hk, t] float32.

    v: a new token's value in that KV head; W_O^h: the rows of the layer's output projection that read query head h. The
    method must declare Needs(layer_weights=("o_proj",)).
    """
    matrices = new.layer_weights["o_proj"]  # [Hq, dv, D]
    group = len(matrices) // new.values.shape[1]
    tokens = max(1, PRODUCT_FLOATS // matrices.shape[-1])
    norms = [
        torch.cat([(part.float() @ matrix.float()).abs().sum(dim=-1) for part in values.split(tokens, dim=1)], dim=1)
        for values, own in zip(new.values.unbind(1), matrices.split(group))
        for matrix in own
    ]
    return torch.stack(norms, dim=1).unflatten(1, (-1, group)).mean(dim=2)
