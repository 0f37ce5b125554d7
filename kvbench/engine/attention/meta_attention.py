"""The bytes that attention over a prompt takes, counted on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from kvbench.engine.attention.geometry import LayerGeometry
from kvbench.engine.attention.grouped import causal_bias, grouped_attention
from kvbench.engine.model.activations import LiveBytes

META = torch.device("meta")
Counting = Callable[[], AbstractContextManager[LiveBytes]]


def attention_bytes(
    g: LayerGeometry, t: int, n: int, dtype: torch.dtype, counting: Counting, *, gpu: bool, uneven: bool
) -> int:
    """Return the bytes that one layer's attention of t queries over n entries per head takes, its mask included.

    counting: opens a block whose tensors are counted; gpu: whether a GPU would compute the attention; uneven: whether
    heads hold different numbers of entries, so that each needs a mask of its own.
    """

    def floats(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=META)

    with counting() as live:
        query, keys = floats(1, g.query_heads, t, g.head_dim), floats(1, g.kv_heads, n, g.head_dim)
        values, sinks = floats(1, g.kv_heads, n, g.read_dim), floats(g.query_heads) if g.sinks else None
        positions = torch.empty((1, g.kv_heads, n) if uneven else (1, 1, n), dtype=torch.int64, device=META)
        given = live.now
        if gpu and g.causal and not uneven:
            bias = None  # the mask of `sdpa.newest_rows` stores no elements
        else:
            valid = torch.ones_like(positions, dtype=torch.bool) if uneven else None
            bias = causal_bias(torch.empty(t, device=META, dtype=torch.int64), positions, g.window, dtype, valid)
        grouped_attention(query, keys, values, bias, scaling=g.scaling, softcap=g.softcap, sinks=sinks)
    return live.peak - given
