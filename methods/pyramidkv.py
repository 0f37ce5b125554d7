"""pyramidkv: SnapKV's scores, with budgets that decrease from the first layer to the last.

Paper: Cai et al., PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling, arXiv 2406.02069.

With budget C, base = C - window and T prompt tokens, layer l = 0 .. L - 1 keeps the window and

    most - l (most - least) / (L - 1)    where least = base / beta and most = 2 base - least.

If `most` exceeds T - window, then `most` = T - window and `least` = 2 base - `most`. L counts the layers that evict.
With `--prefill chunked`, a layer may hold fewer entries than its share; what it lacks is divided evenly among the other
layers. Defaults: beta 20, and those of `snapkv`.

rounding:
    exact     Shares become whole numbers by largest remainder; all layers together keep L C entries per head.
    official  As in KVCache-Factory, `least` and the step between layers are rounded down. If all layers together then
              keep more than L C, the excess is subtracted evenly.
    kvpress   base = C, and a layer's share includes the window. Each share is rounded by itself, and an excess is
              subtracted evenly.

As in the released code, every layer keeps C entries, window included, if the prompt is shorter than 2 base. With
`rounding=kvpress`, every layer does so instead if `least` < window, or `most` < `least`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvbench.eviction.api import Allocation, option
from kvbench.eviction.terms.prompt_vote import PromptVote
from kvbench.eviction.terms.shares import split_exactly
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("pyramidkv")
@dataclass(frozen=True)
class PyramidKV(PromptVote):
    paper = "Cai et al., arXiv 2406.02069"
    version = "2"  # 2: with chunked prefill, no entry of the budget stays unused

    beta: int = option(
        20,
        "steepness: the last layer keeps base / beta scored entries; base: the budget less the window (rounding="
        "kvpress: the whole budget)",
        low=1,
    )
    rounding: Literal["exact", "official", "kvpress"] = option(
        "exact",
        "how layers' numbers of entries are computed. exact: rounded by largest remainder; official: as in "
        "KVCache-Factory; kvpress: as in kvpress, shares of the whole budget with the window",
    )

    def quotas(self, allocation: Allocation) -> torch.Tensor:
        count, held = allocation.layer_count, allocation.held
        most = allocation.held_by_layer
        rows = [self.layer_sizes(allocation.budget, int(seen), count, most) for seen in allocation.seen]
        sizes = torch.tensor(rows, device=held.device)[:, list(allocation.ordinals)]  # [b, L]
        return sizes[..., None].expand_as(held)

    def layer_sizes(self, budget: int, tokens: int, layers: int, held: Sequence[int] = ()) -> list[int]:
        """Return how many entries each layer keeps per head, window included, after a prompt of `tokens` tokens. The
        mean over the layers never exceeds the budget. held: how many each layer holds; (): all `tokens`."""
        ideal = self.ideal_sizes(budget, tokens, layers)
        exact = self.rounding == "exact"
        low = min(self.window + 1 if exact else self.window, tokens)
        total = layers * budget if exact else min(int(sum(ideal)), layers * budget)
        most = torch.tensor([held or [tokens] * layers])
        return split_exactly(torch.tensor([ideal], dtype=torch.float64), total, low, most)[0].tolist()

    def ideal_sizes(self, budget: int, tokens: int, layers: int) -> list[float]:
        """Return each layer's entries per head as the option `rounding` computes them, before the sum is corrected.

        With `rounding=exact` the numbers follow the paper's formula and may have fractions; otherwise they are whole.
        """
        base, older = budget - self.window, tokens - self.window
        uniform = [float(budget)] * layers
        if layers == 1 or tokens <= budget:
            return uniform
        if self.rounding == "kvpress":
            least = budget / self.beta
            most = 2 * budget - least
            if most >= older:
                most, least = float(older), 2.0 * budget - older
            if not most >= least >= self.window:
                return uniform
            return [float(round(most - i * ((most - least) / (layers - 1)))) for i in range(layers)]
        if tokens < 2 * base:
            return uniform
        official = self.rounding == "official"
        least = base // self.beta if official else base / self.beta
        most = 2 * base - least
        if most >= older:
            most, least = older, 2 * base - older
        step = (most - least) // (layers - 1) if official else (most - least) / (layers - 1)
        return [float(most - i * step + self.window) for i in range(layers)]
