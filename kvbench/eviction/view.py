"""What a method sees of one layer at an eviction: the cached entries of several sequences, and helpers that respect order.

Entries lie in storage order, which after the first eviction is not text order. Use `positions`, or the helpers below: `pool`
smooths along the text, `newest` asks for the latest entry, `recent` marks the last tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvbench.eviction import noise
from kvbench.eviction.attend import Domain, Order, Reduce, window_attention
from kvbench.lazy import torch


@dataclass(slots=True, kw_only=True)
class LayerView:
    """Read-only tensors of one layer. b sequences, Hk KV heads, Hq query heads, N entries, w queries, d head dimension."""

    layer: int
    keys: torch.Tensor  # [b, Hk, N, d] post-RoPE
    values: torch.Tensor  # [b, Hk, N, dv]
    positions: torch.Tensor  # [b, Hk, N] int64, absolute
    valid: torch.Tensor  # [b, Hk, N] bool; scores of other entries are ignored
    queries: torch.Tensor  # [b, Hq, w, d] post-RoPE, oldest first
    query_positions: torch.Tensor  # [b, w] int64
    columns: Mapping[str, torch.Tensor] = field(default_factory=dict)  # each [b, Hk, N] float32
    seen: torch.Tensor  # [b] tokens seen so far, T
    prompt_len: torch.Tensor  # [b]
    eviction_index: torch.Tensor  # [b] evictions this sequence had before
    noise_key: torch.Tensor  # [b] int64, one a sample
    budget: int
    scaling: float  # the model's softmax scale, usually 1 / sqrt(d)
    softcap: float | None = None

    def attend(
        self,
        *,
        domain: Domain = "all",
        order: Order = "softmax_then_group",
        reduce_g: Reduce | None = "mean",
        reduce_q: Reduce | None = "mean",
    ) -> torch.Tensor:
        """Attention that `queries` pay to the entries: `attend.window_attention` on this layer, [b, Hk, N] when both reduce."""
        return window_attention(
            self.queries, self.keys, self.query_positions, self.positions, self.valid,
            scaling=self.scaling, softcap=self.softcap, domain=domain, order=order, reduce_g=reduce_g, reduce_q=reduce_q,
        )  # fmt: skip

    def recent(self, count: int) -> torch.Tensor:
        """[b, Hk, N] bool: entries among the newest `count` tokens."""
        return self.positions >= (self.seen - count)[:, None, None]

    def noise(self) -> torch.Tensor:
        """[b, Hk, N] float32 uniform noise: a hash of (sample, eviction, layer, head, position), free of batch and storage."""
        heads = torch.arange(self.positions.shape[1], device=self.positions.device)[None, :, None]
        key = noise.mix(self.noise_key[:, None, None], self.eviction_index[:, None, None], self.layer, heads, self.positions)
        return noise.uniform(key).float()

    def pool(self, scores: torch.Tensor, kind: Literal["max", "avg"], kernel: int, among: torch.Tensor) -> torch.Tensor:
        """Smooth scores [b, Hk, N] along the text over the entries marked in `among` (stride 1, same length).

        Neighbours are the next cached entries in text order. Max pooling ignores what is outside; average pooling divides by
        `kernel` also at the ends (zero padding), as the methods' code does. Entries not in `among` come back as -inf.
        """
        low = torch.iinfo(torch.int64).max
        order = torch.where(among, self.positions, low).argsort(dim=-1)  # entries outside `among` sort behind all others
        inside = among.gather(-1, order)
        pad = float("-inf") if kind == "max" else 0.0
        row = torch.where(inside, scores.gather(-1, order), pad)
        if kind == "max":
            smooth = torch.nn.functional.max_pool1d(row, kernel, stride=1, padding=kernel // 2)
        else:
            smooth = torch.nn.functional.avg_pool1d(row, kernel, stride=1, padding=kernel // 2)
        pooled = torch.empty_like(scores).scatter_(-1, order, smooth)
        return torch.where(among, pooled, float("-inf"))
