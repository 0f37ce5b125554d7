"""Computes attention with the kernel that torch chooses for a device. On the meta device, where a plan counts bytes,
the kernel is that of the device for which the plan is made.

Meta tensors have sizes and no memory. For them torch would choose its slow fallback, which holds all attention weights
at once, so a plan would count too many bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from kvbench.eviction.planned_device import for_gpu

aten: Any = torch.ops.aten


def attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: Any, scaling: float) -> torch.Tensor:
    """Return torch's scaled dot-product attention. bias: a mask, a `CausalBias`, or None."""
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
