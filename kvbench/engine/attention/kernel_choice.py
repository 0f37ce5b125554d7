"""The attention kernel that torch chooses for a device; on the meta device, the one of the device that a plan is for.

A plan counts bytes on the meta device, whose tensors have sizes only. There torch would take its slow formula, which
holds all attention weights at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn import functional as F

_for_gpu: ContextVar[bool] = ContextVar("for_gpu", default=False)
aten: Any = torch.ops.aten


@contextmanager
def planned_for(*, gpu: bool) -> Iterator[None]:
    """While the block runs, meta tensors take the kernels of a GPU, or else of a CPU."""
    token = _for_gpu.set(gpu)
    try:
        yield
    finally:
        _for_gpu.reset(token)


def on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on a GPU, or on the meta device for a GPU's plan."""
    return tensor.is_cuda or (tensor.is_meta and _for_gpu.get())


def attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: Any, scaling: float) -> torch.Tensor:
    """Return torch's scaled dot-product attention. bias: a mask, a `CausalBias`, or None."""
    if not query.is_meta:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scaling)
    mask = bias if type(bias) is torch.Tensor else None  # a CausalBias has no elements
    if not _for_gpu.get():
        kernel = aten._scaled_dot_product_flash_attention_for_cpu
        return kernel(query, keys, values, attn_mask=mask, scale=scaling)[0]
    if mask is not None:
        mask = mask.expand(*query.shape[:3], keys.shape[2])
    graph = torch.is_grad_enabled() and any(t.requires_grad for t in (query, keys, values))
    kernel = aten._scaled_dot_product_efficient_attention
    return kernel(query, keys, values, mask, graph, scale=scaling)[0]
