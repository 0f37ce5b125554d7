"""ada-kv: the heads of a layer share its budget; a head with more of the layer's best scores keeps more.

Paper: Feng et al., Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation, arXiv 2407.11550.

Another method, `base`, gives the scores, the window and the time of eviction. `base` is a name, or a name with options
as tables print it: ``snapkv(window=32, kernel=7)``. With budget C, and free = C minus the protected entries of a head:

    count_h     number of head h's entries among the layer's best Hk * free scores
    capacity_h  (1 - floor_alpha) * count_h + floor_alpha * free, in addition to the protected entries

Each head keeps its capacity_h best entries. `normalize` first multiplies the scores of a head by a factor: the sum of
the head's `free` largest scores, divided by the sum of all its scores. Scores of protected entries do not count in
either sum. If the layer's lowest score is negative (possible with gkv and rkv), it is first subtracted from all scores.
If `base` has budgets per layer (pyramidkv), heads share their layer's budget.

    rounding=exact     every layer's total is exact (largest remainder)
    rounding=official  as in the released code: floor_alpha * free is rounded down, and each head's capacity to the
                       nearest integer; an excess over the budget is subtracted evenly
    floor=guarantee    every head keeps its best floor_alpha C entries, protected entries included, and all other
                       entries compete; with normalize=false, this is kvpress's rule

The defaults are those of the released prediction script.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvbench.eviction import returned
from kvbench.eviction.api import Allocation, ScoreOut, option
from kvbench.eviction.delegate import Wrapper, check_base, delegate
from kvbench.eviction.options import OptionError
from kvbench.eviction.select import allocation_of, competing, keep_mask, order_key
from kvbench.eviction.terms.rkv_slot_order import RANK
from kvbench.eviction.terms.shares import split_exactly
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("ada-kv", aliases=("adakv",))
@dataclass(frozen=True)
class AdaKV(Wrapper):
    paper = "Feng et al., arXiv 2407.11550"
    version = "3"  # 3: shares of a `base` such as pyramidkv fill the budget on prompts in chunks

    base: str = option("snapkv", "the method that scores, with its options in brackets")
    floor_alpha: float = option(0.2, "share of the budget that is spread evenly over heads", low=0, high=1)
    normalize: bool = option(
        True,
        "multiply a head's scores by the sum of its n largest scores, divided by the sum of all its scores; n: how "
        "many unprotected entries the head would keep with an even budget",
    )
    floor: Literal["mix", "guarantee"] = option(
        "mix",
        "what floor_alpha means. mix: this share of the budget is divided evenly, the rest by scores; guarantee: every "
        "head keeps at least this share",
    )
    rounding: Literal["exact", "official"] = option(
        "exact",
        "how capacities become whole numbers (floor=mix). exact: by largest remainder; official: as in the released "
        "code",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.floor == "guarantee" and self.rounding == "official":
            raise OptionError("rounding", "is for floor=mix; with floor=guarantee nothing is rounded.")
        check_base(
            self,
            (lambda inner: isinstance(inner, AdaKV), "another method than ada-kv"),
            (lambda inner: not inner.takes_budget, "a method that takes a budget"),
            (lambda inner: inner.scope != "head" or inner.joint, "a method whose heads do not share a budget already"),
            (lambda inner: RANK in inner.columns(), "a method whose scores can be compared between heads"),
        )

    def score(self, view: LayerView) -> ScoreOut:
        out = ScoreOut.of(self.inner.score(view))
        return ScoreOut(out.score, out.columns, {"capacity": self._capacities(view, out)})

    def quotas(self, allocation: Allocation) -> torch.Tensor:
        return allocation.stats["capacity"]

    def _capacities(self, view: LayerView, out: ScoreOut) -> torch.Tensor:
        """Return how many entries each head keeps, protected entries included, [b, Hk] int64."""
        among = competing(self, view)
        held, free = view.held(), among.sum(dim=-1)
        fixed = held - free
        heads = held.shape[1]
        total = torch.minimum(self._total(view, out), held.sum(dim=-1))  # [b]
        left = (total - fixed.sum(dim=-1)).clamp(min=0)
        low = fixed.clamp(min=1)
        if self.replaced is not None:  # a layer that lacks room for its protected entries gets it from other layers
            low = torch.where((total < fixed.sum(dim=-1))[:, None], 1, low)  # see `select._with_room`
        score = torch.where(among, out.score.float(), float("-inf"))
        if self.normalize:
            score = _weighted(score, among, left // heads)
        if self.floor == "guarantee":
            sure = (total // heads * self.floor_alpha).long()[:, None] - fixed
            count = self._counts(view, score, among, left, sure)
            return split_exactly(fixed + count, total, low, held)
        count = self._counts(view, score, among, left, None)
        if self.rounding == "official":
            floor = (left // heads * self.floor_alpha).long()[:, None]
            capacity = (count.float() * (1 - self.floor_alpha) + floor).round().long()
            capacity = (fixed + capacity).clamp(min=1).minimum(held)
            return split_exactly(capacity, torch.minimum(capacity.sum(dim=-1), total), low, held)
        even = (left.double() / heads)[:, None]
        ideal = fixed + count * (1 - self.floor_alpha) + even * self.floor_alpha
        return split_exactly(ideal, total, low, held)

    def _total(self, view: LayerView, out: ScoreOut) -> torch.Tensor:
        """Return how many entries all heads of the layer together may keep, [b]."""
        even = view.seen.new_full(view.seen.shape, view.budget * view.positions.shape[1])
        if self.inner.uniform:
            return even
        quotas = returned.quotas_of(self.inner, allocation_of([view], [out]))
        return even if quotas is None else view.per_row(quotas).sum(dim=-1)

    def _counts(
        self, view: LayerView, score: torch.Tensor, among: torch.Tensor, left: torch.Tensor, sure: torch.Tensor | None
    ) -> torch.Tensor:
        """Return how many of the layer's best entries belong to each head, [b, Hk].

        left: [b] how many of the best entries are counted. among: mask of the entries that compete. sure: [b, Hk] how
        many entries each head keeps in any case; None: 0.
        """
        key = order_key(score, view.positions)
        if sure is not None:
            safe = keep_mask(score, view.positions, among, None, sure)
            key = key.masked_fill(safe, torch.iinfo(torch.int64).max)
        key = key.masked_fill(~among, torch.iinfo(torch.int64).min).flatten(1)
        best = self.selector().choose(key, left, distinct=False).view_as(among)
        return (best & among).sum(dim=-1)


def _weighted(score: torch.Tensor, among: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """Multiply each head's scores by a factor: the sum of the head's `best` [b] largest scores, divided by the sum of
    all its scores.

    If a layer has a negative score, the layer's lowest score is first subtracted from all of the layer's scores.
    Infinite scores stay as they are and do not count in the sums. among: the entries that compete; others have -inf.
    """
    finite = among & score.isfinite()
    lowest = torch.where(finite, score, float("inf")).amin(dim=(1, 2), keepdim=True).clamp(max=0.0)
    score = score - lowest
    # Double, so that padding does not change the rounded sums.
    ranked = torch.where(finite, score, 0.0).double().sort(dim=-1, descending=True).values
    top = torch.arange(ranked.shape[-1], device=ranked.device) < best[:, None, None]
    share = (ranked * top).sum(dim=-1) / ranked.sum(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.where(finite, score * share.float()[..., None], score)


delegate(AdaKV, "summed")  # all else is as `base` declares it
