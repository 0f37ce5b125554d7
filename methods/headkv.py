"""headkv: SnapKV's scores, with a budget per head by the head's importance for retrieval and reasoning.

Paper: Fu et al., Not All Heads Matter: A Head-Level KV Cache Compression Method with Integrated Retrieval and
Reasoning, arXiv 2410.19258.

A table estimated beforehand gives every query head an importance. With budget C, let base = C - window. Every KV head
puts floor(base / beta) entries into a pool, keeps the others, and gets back a share pi_h of the pool:

    capacity_h = base - floor(base / beta) + pi_h floor(base / beta) L Hk

pi is the table to the power `temp`, averaged over each group of query heads and normalised over the heads of all layers
that evict. The window stays in addition. Defaults: beta 1.2, temp 1, and the defaults of `snapkv`.

The released code gives every query head a separate cache and rounds each capacity by itself; here a KV head takes the
mean over its group, as in KVCache-Factory, and largest remainders make the sum exact. Every head keeps at least one
entry beside the window; budget that a head cannot fill goes to the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.errors import UserError
from kvbench.eviction.api import Allocation, Weights, option
from kvbench.eviction.terms.prompt_vote import PromptVote
from kvbench.eviction.terms.shares import split_exactly
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("headkv")
@dataclass(frozen=True)
class HeadKV(PromptVote):
    paper = "Fu et al., arXiv 2410.19258"
    kind = "weights"
    trained = True
    joint = True  # shares are relative to all heads of all layers that evict

    table: str = option(
        "auto", "file with the importance of every query head; auto: headkv.safetensors beside the model"
    )
    beta: float = option(
        1.2, "every head puts base / beta entries into the shared pool; base: the budget less the window", low=1
    )
    temp: float = option(1.0, "power to which importances are raised; above 1 differences grow", above=0)

    def weights(self) -> Weights:
        return Weights(kind="headkv", path=self.table, recipe="headkv")

    def quotas(self, allocation: Allocation) -> torch.Tensor:
        held = allocation.held
        b, layers, heads = held.shape
        base = allocation.budget - self.window
        pooled = int(base // self.beta)
        share = self._shares(allocation).to(held.device)  # [L, Hk], summing to 1
        ideal = self.window + base - pooled + share * (pooled * layers * heads)
        flat = held.reshape(b, -1)
        low = flat.clamp(max=self.window + 1)
        total = layers * heads * allocation.budget
        return split_exactly(ideal.reshape(1, -1).expand(b, -1), total, low, flat).view_as(held)

    def _shares(self, allocation: Allocation) -> torch.Tensor:
        table = allocation.weights["importance"].double()
        if table.ndim != 2 or table.shape[1] != allocation.query_heads or table.shape[0] <= max(allocation.layers):
            raise UserError(
                f"headkv: the table has shape {list(table.shape)}; for this model the table needs at least "
                f"{max(allocation.layers) + 1} rows (layers) and exactly {allocation.query_heads} columns (query "
                "heads). Use this model's table."
            )
        if not bool((table.isfinite() & (table >= 0)).all()):
            raise UserError("headkv: the table has a negative or non-finite number. Run 'kvbench train headkv' again.")
        table = table[list(allocation.layers)]
        if not bool(table.any()):
            table = torch.ones_like(table)
        # Only ratios count; dividing by the largest keeps high powers in range.
        power = (table / table.max()) ** self.temp
        grouped = power.unflatten(1, (allocation.held.shape[2], -1)).mean(dim=2)
        return grouped / grouped.sum()
