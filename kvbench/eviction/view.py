"""What a method sees of one layer at an eviction: entries of several sequences, and helpers that respect order.

Entries lie in storage order, which after the first eviction is not text order. Use `positions`, or the helpers below:
`pool` smooths along the text, `recent` and `older` tell the last tokens from the rest.
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
    """Read-only tensors of a layer. b sequences, Hk KV heads, Hq query heads, N entries, w queries, d dimensions."""

    layer: int
    keys: torch.Tensor  # [b, Hk, N, d] post-RoPE
    values: torch.Tensor | None  # [b, Hk, N, dv]; None unless the method needs them
    positions: torch.Tensor  # [b, Hk, N] int64, absolute
    valid: torch.Tensor  # [b, Hk, N] bool; scores of other entries are ignored
    whole: bool = False  # known to be all valid, so that helpers may leave the mask out
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
        """Attention that `queries` pay to the entries, [b, Hk, N] when both axes reduce: see `window_attention`."""
        return window_attention(
            self.queries,
            self.keys,
            self.query_positions,
            self.positions,
            None if self.whole else self.valid,
            scaling=self.scaling,
            softcap=self.softcap,
            domain=domain,
            order=order,
            reduce_g=reduce_g,
            reduce_q=reduce_q,
        )

    def recent(self, count: int) -> torch.Tensor:
        """[b, Hk, N] bool: entries among the newest `count` tokens."""
        return self.positions >= (self.seen - count)[:, None, None]

    def older(self, count: int) -> torch.Tensor:
        """[b, Hk, N] bool: valid entries that are not among the newest `count` tokens, the ones that compete."""
        older = self.positions < (self.seen - count)[:, None, None]
        return older if self.whole else self.valid & older

    def noise(self) -> torch.Tensor:
        """[b, Hk, N] float32 uniform noise: a hash of (sample, eviction, layer, head, position) and of nothing else."""
        heads = torch.arange(self.positions.shape[1], device=self.positions.device)[None, :, None]
        key = noise.mix(
            self.noise_key[:, None, None], self.eviction_index[:, None, None], self.layer, heads, self.positions
        )
        return noise.uniform(key).float()

    def text_order(self) -> torch.Tensor:
        """[b, Hk, N] int64 indices that list the valid entries in text order; all others come behind them."""
        key = self.positions.int()
        if not self.whole:
            key = key.masked_fill(~self.valid, torch.iinfo(torch.int32).max)
        if key.device.type == "cpu":  # numpy sorts short rows more than twice as fast, and this runs at every eviction
            return torch.from_numpy(key.numpy().argsort(axis=-1))
        return key.argsort(dim=-1)

    def pool(
        self,
        scores: torch.Tensor,
        kind: Literal["max", "avg"],
        kernel: int,
        among: torch.Tensor,
        order: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Smooth scores [b, Hk, N] along the text over the entries marked in `among` (stride 1, same length).

        Neighbours are the next cached entries in text order, or in `order`: indices as `text_order` gives them, in
        which the marked entries stand together. Max pooling ignores what is outside; average pooling divides by
        `kernel` also at the ends (zero padding), as the methods' code does. Entries not in `among` come back as -inf.
        """
        if order is None:
            order = self.text_order()
        inside = among.gather(-1, order)
        pad = float("-inf") if kind == "max" else 0.0
        row = torch.where(inside, scores.gather(-1, order), pad)
        if kind == "max":
            smooth = torch.nn.functional.max_pool1d(row, kernel, stride=1, padding=kernel // 2)
        else:
            smooth = torch.nn.functional.avg_pool1d(row, kernel, stride=1, padding=kernel // 2)
        pooled = torch.empty_like(scores).scatter_(-1, order, smooth)
        return torch.where(among, pooled, float("-inf"))


def make_view(
    keys: torch.Tensor,
    queries: torch.Tensor | None = None,
    *,
    budget: int,
    positions: torch.Tensor | None = None,
    valid: torch.Tensor | None = None,
    columns: Mapping[str, torch.Tensor] | None = None,
    seen: int | None = None,
) -> LayerView:
    """A view of keys [b, Hk, N, d] and of the newest queries [b, Hq, w, d], with plain values for all else.

    For trying a method out, and for tests. Without `positions` the entries lie in text order and nothing was evicted.
    """
    b, _, n, d = keys.shape
    if positions is None:
        positions = torch.arange(n, device=keys.device).expand(keys.shape[:3])
    if queries is None:
        queries = keys.new_zeros(b, keys.shape[1], 0, d)
    count = torch.full((b,), int(positions.max()) + 1 if seen is None else seen, device=keys.device)
    width = queries.shape[2]
    return LayerView(
        layer=0,
        keys=keys,
        values=keys,
        positions=positions,
        valid=torch.ones_like(positions, dtype=torch.bool) if valid is None else valid,
        queries=queries,
        query_positions=count[:, None] + torch.arange(-width, 0, device=keys.device),
        columns=columns or {},
        seen=count,
        prompt_len=torch.zeros_like(count),
        eviction_index=torch.zeros_like(count),
        noise_key=torch.arange(b, device=keys.device),
        budget=budget,
        scaling=d**-0.5,
    )
