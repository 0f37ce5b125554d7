"""lagkv: keep tokens whose keys and values are spread unevenly over channels, relative to the text that follows.

Paper: Liang et al., LagKV: Lag-Relative Information of the KV Cache Tells Which Tokens Are Important, arXiv 2504.04704.
No query is read.

The first `sinks` entries stay. The others form partitions of `lag` entries, in text order; the last full partition and
the entries after it stay too. Each other partition is scored by the partition that follows, per KV head:

    u_jd = (x_jd - low_d) / (high_d - low_d)     x: keys or values; low_d, high_d: smallest and largest number of
                                                 channel d in the partition that follows; u_jd = 0 if they are equal
    s_j  = softmax over the partition of the standard deviation of u_j over channels
    score: s_j of the key + value_weight * s_j of the value

form=budget follows kvpress, here at every eviction: an entry counts by the rank of its score within its partition, and
the best of all partitions stay. Every partition has an entry of each rank, so ties are common; the newer entry stays.
`cross=true` compares scores instead of ranks. After an eviction, partitions consist of the entries that the head holds.

form=rate follows the released code: there is no budget. As soon as two partitions are full, the older one keeps its
best `keep` * `lag` entries for good. The cache grows by `keep` entries per token, and the run's interval has no effect.

Defaults: 4 sinks and partitions of 128 as in kvpress (released class: 16 and 1024); keep 0.2 as in the README.
Traps: the option ratio is the removed share in kvpress and the kept share in the released code. With a budget below the
number of entries that should always stay, kvpress keeps an arbitrary part of them; here the smallest budget is
sinks + 2 * lag.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvbench.eviction.api import Every, Method, Needs, Protect, Trigger, option
from kvbench.eviction.terms.blocks import in_blocks
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("lagkv")
@dataclass(frozen=True)
class LagKV(Method):
    paper = "Liang et al., arXiv 2504.04704"
    kind = "keys"
    stacked = True

    sinks: int = option(4, "first tokens that always stay", low=0)
    lag: int = option(128, "entries in a partition; at least this many of the newest always stay", low=2)
    value_weight: float = option(1.0, "weight of the value's score; that of the key's is 1", low=0)
    cross: bool = option(False, "compare scores between partitions, not ranks (form=budget)")
    form: Literal["budget", "rate"] = option(
        "budget", "budget: evict to the budget; rate: no budget, every partition keeps the share `keep`"
    )
    keep: float = option(0.2, "share of a partition that stays (form=rate)", low=0, high=1)

    @property
    def takes_budget(self) -> bool:
        return self.form == "budget"

    decode_bounded = takes_budget

    @property
    def _dropped(self) -> int:
        """Return how many entries a partition loses (form=rate)."""
        return self.lag - int(self.keep * self.lag)

    def needs(self) -> Needs:
        return Needs(values=True)

    def protect(self, budget: int) -> Protect:
        return Protect(sinks=self.sinks, recent=self.lag)

    def unscored(self) -> int:
        return self.lag  # no partition follows the last one

    def min_budget(self) -> int:
        return max(super().min_budget(), self.sinks + 2 * self.lag)

    def trigger(self, interval: int) -> Trigger:
        return Every(interval) if self.takes_budget else Every(1)

    def allowed(self, budget: int | None, prompt_len: int, seen: int, evictions: int) -> int:
        if self.takes_budget:
            return super().allowed(budget, prompt_len, seen, evictions)
        return seen - max(0, (seen - self.sinks) // self.lag - 1) * self._dropped

    def score(self, view: LayerView) -> torch.Tensor:
        assert view.values is not None
        order, held = view.text_order(), view.held()[..., None]
        first, slot = self._first(view, held), torch.arange(order.shape[-1], device=order.device)
        whole = slot[: len(slot) // self.lag * self.lag]
        if len(whole) < 2 * self.lag:
            return torch.full_like(order, float("inf"), dtype=torch.float32)
        places = order.gather(-1, (first + whole).clamp(max=len(slot) - 1))  # of the entries of all partitions
        score = self._of_vectors(view.keys, places)
        score = score + self.value_weight * self._of_vectors(view.values, places)
        if not (self.cross and self.takes_budget):
            score = score.argsort(dim=-1, stable=True).argsort(dim=-1) / self.lag
        row = score.flatten(2).gather(-1, (slot - first).clamp(0, len(whole) - self.lag - 1))
        end = first + ((held - first) // self.lag - 1) * self.lag
        return torch.empty_like(row).scatter_(-1, order, row.where((slot >= first) & (slot < end), float("inf")))

    def _of_vectors(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return in_blocks(x, x.shape[1:].numel(), lambda rows: _unevenness(x[rows], places[rows], self.lag))

    def _first(self, view: LayerView, held: torch.Tensor) -> torch.Tensor:
        """Return how many of each head's first entries in text order are not scored, [b, Hk, 1] int64."""
        if self.takes_budget:
            return torch.full_like(held, self.sinks if self.replaced is None else self.replaced.sinks)
        before = (view.seen[:, None, None] - held) // max(1, self._dropped)  # partitions that were scored before
        return self.sinks + before * (self.lag - self._dropped)


def _unevenness(x: torch.Tensor, index: torch.Tensor, lag: int) -> torch.Tensor:
    """Return the score of each entry of all partitions but the last, [b, Hk, P - 1, lag] float32.

    Each channel is scaled so that its minimum and maximum in the next partition become 0 and 1; a channel that is
    constant in the next partition becomes 0. An entry's score is the standard deviation over its channels, put through
    a softmax over the entries of its partition. No partition follows the last one, so the last one gets no scores.

    x: keys or values [b, Hk, N, d]; index: [b, Hk, P lag], the indices of the entries of P partitions, `lag` entries
    each.
    """
    heads = x.flatten(0, 1)
    first = torch.arange(len(heads), device=x.device).view(*x.shape[:2], 1) * x.shape[2]  # row of a head's first entry
    # On a CPU, selecting whole vectors is many times as fast as a gather of their numbers.
    entries = heads.flatten(0, 1).index_select(0, (first + index).flatten())
    parts = entries.float().view(*index.shape[:2], -1, lag, x.shape[-1])
    low, high = parts[:, :, 1:].amin(dim=3, keepdim=True), parts[:, :, 1:].amax(dim=3, keepdim=True)
    return (parts[:, :, :-1] - low).div_(high - low).masked_fill_(high == low, 0.0).std(dim=-1).softmax(dim=-1)
