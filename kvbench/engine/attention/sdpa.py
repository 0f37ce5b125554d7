"""Grouped-query attention by torch's `scaled_dot_product_attention`, on CPU and CUDA.

The g query heads of a group share the keys and values of one KV head without a copy:

- For one token, the group's g queries become queries of one head.
- For a block of t tokens on CPU, the g * t queries become queries of one head, which is fastest there. The mask is
  repeated g times.
- For a block on CUDA, each group becomes a sequence of a batch, whose g heads read views of one KV head. The mask is
  not repeated, and a causal block needs no mask, so flash attention can compute it.
"""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right

from kvbench.engine.attention.kernel_choice import attention
from kvbench.eviction.planned_device import on_gpu

WIDEST = 256  # largest head dimension of flash attention; the kernel for larger ones also stores a float32 output
# Without cuDNN, whose backend would build a plan for every prompt length. Efficient attention takes masks, flash not.
_CUDA_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def newest_rows(count: int, rows: int) -> torch.Tensor | None:
    """Return the causal mask for the queries of the newest `count` of `rows` tokens.

    The mask is an object that stores no elements. Query i (from 0) sees all keys but the newest count - 1 - i. Returns
    None if no key is hidden. Only `grouped_sdpa` on CUDA takes such a mask.
    """
    return causal_lower_right(count, rows) if count > 1 else None


def grouped_sdpa(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Return the attention [b, Hk, g, t, Dv]. query: [b, Hk, g, t, D]; keys, values, bias: see `grouped_attention`."""
    b, hk, g, t, _ = query.shape
    if on_gpu(query):
        rows = _one_query if t == 1 else _groups_as_batch
        with sdpa_kernel(_CUDA_BACKENDS):
            return rows(query, keys, values, bias, scaling).view(b, hk, g, t, -1)
    if bias is not None and t > 1:
        bias = bias.expand(*bias.shape[:-2], t, bias.shape[-1]).repeat(1, 1, g, 1)
    return _one_query(query, keys, values, bias, scaling).view(b, hk, g, t, -1)


def _one_query(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Attend with all g * t queries of a group as queries of one head. query, keys, values: see `grouped_sdpa`.

    bias: [..., g * t or 1, n], a mask per query or one for all.
    """
    return attention(query.flatten(2, 3), keys, values, bias, scaling)


def _groups_as_batch(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Attend with the b * Hk groups as b * Hk sequences, each with g query heads and one KV head."""
    g = query.shape[2]
    if bias is not None and not isinstance(bias, CausalBias) and bias.shape[:2] != (1, 1):
        bias = bias.expand(*keys.shape[:2], *bias.shape[2:]).flatten(0, 1)[:, None]
    shared_keys, shared_values = (x.flatten(0, 1)[:, None].expand(-1, g, -1, -1) for x in (keys, values))
    return attention(query.flatten(0, 1), shared_keys, shared_values, bias, scaling)
