"""Grouped-query attention by torch's `scaled_dot_product_attention`, on CPU and CUDA.

The g query heads of a group share the keys and values of one KV head without a copy:

- For one token, the group's g queries become queries of one head.
- For a block of t tokens on CPU, the g * t queries become queries of one head, which is fastest there. The mask is
  repeated g times.
- For a block on CUDA, each group becomes a sequence of a batch, whose g heads read views of one KV head. The mask is
  not repeated, and a causal block needs no mask, so flash attention can compute it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes

from kvbench.eviction.planned_device import for_gpu, on_gpu

aten: Any = torch.ops.aten
WIDEST = 256  # largest head dimension of flash attention; the kernel for larger ones also stores a float32 output
# Without cuDNN, whose backend would build a plan for every prompt length. Efficient attention takes masks, flash not.
_CUDA_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def newest_rows(count: int, rows: int) -> torch.Tensor | None:
    """Return the causal mask for the queries of the newest `count` of `rows` tokens.

    The mask is an object that stores no elements. Query i (from 0) sees all keys but the newest count - 1 - i. Returns
    None if no key is hidden. Only `grouped_sdpa` on CUDA takes such a mask.
    """
    if count == 1:
        return None
    with _disable_current_modes():  # torch 2.13 cannot make the mask in a dispatch mode, such as a plan's ledger
        return causal_lower_right(count, rows)


def grouped_sdpa(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Return the attention [b, Hk, g, t, Dv]. query: [b, Hk, g, t, D]; keys, values, bias: see `grouped_attention`."""
    b, hk, g, t, _ = query.shape
    if on_gpu(query):
        with sdpa_kernel(_CUDA_BACKENDS):
            if t > 1:
                out = _groups_as_batch(query, keys, values, bias, scaling)
            else:
                out = _attention(query.flatten(2, 3), keys, values, bias, scaling)
    else:
        if bias is not None and t > 1:
            bias = bias.expand(*bias.shape[:-2], t, bias.shape[-1]).repeat(1, 1, g, 1)
        out = _attention(query.flatten(2, 3), keys, values, bias, scaling)
    return out.view(b, hk, g, t, -1)


def _groups_as_batch(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Attend with the b * Hk groups as b * Hk sequences, each with g query heads and one KV head."""
    g = query.shape[2]
    if bias is not None and not isinstance(bias, CausalBias) and bias.shape[:2] != (1, 1):
        bias = bias.expand(*keys.shape[:2], *bias.shape[2:]).flatten(0, 1)[:, None]
    shared_keys, shared_values = (x.flatten(0, 1)[:, None].expand(-1, g, -1, -1) for x in (keys, values))
    return _attention(query.flatten(0, 1), shared_keys, shared_values, bias, scaling)


def _attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """Return torch's scaled dot-product attention. bias: a mask, a `CausalBias`, or None.

    On the meta device the kernel is that of the device for which a plan counts bytes. For meta tensors, which have
    sizes and no memory, torch would choose its slow fallback, which holds all attention weights at once.
    """
    if not query.is_meta:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scaling)
    mask = bias if type(bias) is torch.Tensor else None  # a CausalBias has no elements
    if not for_gpu():
        kernel = aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(query, keys, values, attn_mask=mask, scale=scaling)[0]
    if mask is not None:
        mask = mask.expand(*query.shape[:3], keys.shape[2])
    graph = torch.is_grad_enabled() and any(t.requires_grad for t in (query, keys, values))
    kernel = aten._scaled_dot_product_efficient_attention
    return kernel(query, keys, values, mask, graph, scale=scaling)[0]
