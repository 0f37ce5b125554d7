"""duo: retrieval heads keep all tokens, streaming heads keep the first and the newest tokens.

Paper: Xiao et al., DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads,
arXiv 2410.10819.

A trained number alpha says how much a KV head needs its whole cache. Of the heads of all layers, those with the
smallest alpha become streaming heads. A streaming head keeps `sinks` + `recent` entries after the prompt and while
decoding; with `--prefill chunked` also while the prompt is read. The other heads are retrieval heads.

    sparsity=S   at least a share S of the heads stream, as in the paper. The method then takes no budget.
    otherwise    the largest number R of retrieval heads that fits the budget C right after a prompt of P tokens:
                 R P + (heads - R) (sinks + recent) <= heads C. This choice of heads holds for the whole sequence. If
                 sinks + recent > C and P > C, all heads stream, with sinks and recent shrunk in proportion.

Retrieval heads also keep all generated entries, so the cache is unbounded: the budget grows by one entry per generated
token. Defaults: sinks 64, recent 256, as deployed in the paper. In the released code the heads with alpha above a
quantile are retrieval heads; kvpress rounds the number of heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvbench.eviction.api import Allocation, EveryTime, Method, Needs, ScoreOut, Trigger, Weights, option
from kvbench.eviction.options import OptionError
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("duo", aliases=("duo-attention",))
@dataclass(frozen=True)
class Duo(Method):
    paper = "Xiao et al., arXiv 2410.10819"
    kind = "weights"
    joint = True  # streaming heads are chosen over all layers that evict
    stacked = True
    trained = True

    sinks: int = option(64, "first tokens that a streaming head keeps", low=0)
    recent: int = option(256, "newest tokens that a streaming head keeps", low=1)
    sparsity: float | None = option(None, "least share of heads that stream; none: the budget decides", low=0, high=1)
    table: str = option("auto", "file with alpha per KV head; auto: duo.safetensors beside the model")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.table:
            raise OptionError("table", "is empty; give a file, or auto.")

    def needs(self) -> Needs:
        return Needs(keys=False)

    def weights(self) -> Weights | None:
        return Weights(kind="duo", path=self.table, recipe="duo")

    def trigger(self, interval: int) -> Trigger:
        return EveryTime(interval)  # evict streaming heads even while the mean over heads is within the budget

    def allowed(self, budget: int | None, prompt_len: int, seen: int, evictions: int) -> int:
        if self.sparsity is not None:
            return math.ceil(self.sparsity * min(self._size, seen) + (1 - self.sparsity) * seen)
        return super().allowed(budget, prompt_len, seen, evictions) + max(0, seen - prompt_len)

    @property
    def takes_budget(self) -> bool:
        return self.sparsity is None

    @property
    def decode_bounded(self) -> bool:
        return False

    def min_budget(self) -> int:
        least = min(self.sinks, 1) + 1  # streaming heads shrink to a sink and the newest token
        return max(super().min_budget(), least)

    def score(self, view: LayerView) -> ScoreOut:
        size = self._streaming(view.budget - (view.seen - view.prompt_len).clamp_min(0))
        sinks = (self.sinks * size // self._size).clamp_min(min(self.sinks, 1))
        positions = view.positions.float()
        return ScoreOut(torch.where(view.positions < sinks[:, None, None], float("inf"), positions))

    def quotas(self, allocation: Allocation) -> torch.Tensor:
        held = allocation.held
        alpha = torch.stack([allocation.weights["alpha"][layer] for layer in allocation.layers])
        rank = alpha.flatten().argsort(stable=True).argsort(stable=True).view(alpha.shape).to(held.device)
        # The budget without the growth that `allowed` adds: as right after the prompt.
        budget = allocation.budget - (allocation.seen - allocation.prompt_len).clamp_min(0)
        size = self._streaming(budget)
        heads = alpha.numel()
        if self.sparsity is not None:
            streaming = torch.full_like(size, math.ceil(self.sparsity * heads - 1e-9))
        else:
            excess = (allocation.prompt_len - size).clamp_min(1)  # entries that only a retrieval head keeps
            retrieval = (heads * (budget - size) // excess).clamp(0, heads)
            streaming = torch.where(allocation.prompt_len > budget, heads - retrieval, 0)
        streams = rank[None] < streaming[:, None, None]
        return torch.where(streams, torch.minimum(held, size[:, None, None]), held)

    @property
    def _size(self) -> int:
        return self.sinks + self.recent

    def _streaming(self, budget: torch.Tensor) -> torch.Tensor:
        """Return how many entries a streaming head keeps, [b], one number per sequence, at the budgets `budget` [b]."""
        size = torch.full_like(budget, self._size)
        return size if self.sparsity is not None else torch.minimum(size, budget)
