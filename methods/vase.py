"""vase: always keep values of large range; draw the other entries at random, with probabilities by attention.

Paper: VaSE, arXiv 2606.03928.

The newest `window` tokens and the first `sinks` always stay. Of the other entries these stay:

    large   those with the largest range max_d v_jd - min_d v_jd; the option `large` is their number plus the sinks
    drawn   as many as the budget still has room for, drawn without replacement with probabilities proportional to a_j

a_j is the attention that the newest `window` queries pay to entry j: softmax over all older entries, mean over queries
and group, average pooling. The draw takes the entries with the largest a_j / e_j. Here e_j = -log u_j, where u_j is a
hash of sample, eviction, layer, head and position. `draw=false` takes the largest a_j; with `sinks=0` too, it is the
paper's ablation range_attn.

Defaults as in the released scripts: window 64, a quarter of the budget for large values (class: 200 entries), pooling
of 5. In the released code the window is also the interval between evictions, and the budget must be a multiple of it.
The released code does not sort its entries, so from the second eviction on it pools over neighbours in rank
(`compat=reference`). It refuses models with one query head per KV head; kvbench accepts them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvbench.eviction.api import Column, Method, Needs, Protect, ScoreOut, option
from kvbench.eviction.select import competing, kept_always
from kvbench.eviction.terms.ranks import ranks
from kvbench.eviction.terms.rkv_slot_order import RANK, slot_order
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("vase")
@dataclass(frozen=True)
class VaSE(Method):
    paper = "VaSE, arXiv 2606.03928"
    stacked = True

    window: int = option(64, "newest tokens: their queries vote, and they always stay", low=1)
    large: float = option(
        0.25,
        "entries kept for their value's range, sinks included: below 1 a share of the budget, otherwise a number",
        low=0,
    )
    sinks: int = option(4, "first tokens that always stay", low=0)
    kernel: int = option(5, "average-pooling width, 1 for none", low=1, odd=True)
    draw: bool = option(
        True, "fill the rest of the budget with random draws; false: with the entries of most attention"
    )
    compat: Literal["none", "reference"] = option(
        "none", "reproduce the released code: entries are not sorted before pooling"
    )

    def needs(self) -> Needs:
        return Needs(queries="window", window=self.window, keys=False, values=True)

    def columns(self) -> tuple[Column, ...]:
        return (RANK,) if self.compat == "reference" else ()

    def protect(self, budget: int) -> Protect:
        return Protect(sinks=self.sinks, recent=self.window)

    def score(self, view: LayerView) -> ScoreOut:
        assert view.values is not None
        older, free, kept = view.older(self.window), competing(self, view), kept_always(self, view)
        values = view.values.float()
        place = ranks(values.amax(dim=-1) - values.amin(dim=-1), view.positions, free)
        share = self.large * view.budget if self.large < 1 else self.large
        room = view.budget - (view.held() - free.sum(dim=-1))
        large = free & (place < room.clamp(max=int(share) - kept.sinks)[..., None])
        drawn = free & ~large
        place = torch.where(drawn, ranks(self._chance(view, older), view.positions, drawn) + large.sum(-1, True), place)
        place = torch.where(free, place + kept.sinks, 0).float()
        return ScoreOut(-place, self._slots(view, place, older))

    def _chance(self, view: LayerView, older: torch.Tensor) -> torch.Tensor:
        """Return the older entries' attention a_j, [b, Hk, N]; with `draw`, a_j divided by random numbers e_j. Taking
        the entries with the largest a_j / e_j is then a random draw, with probabilities proportional to a_j."""
        order = slot_order(view) if self.columns() else view.text_order()
        paid = view.last_queries(self.window).attend(domain="outside_window")
        paid = view.pool(paid, "avg", self.kernel, older, order)
        return (paid / -view.noise().clamp(1e-20, 1 - 2**-24).log()).float() if self.draw else paid

    def _slots(self, view: LayerView, place: torch.Tensor, older: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the column of ranks if compat=reference, otherwise no columns. A rank is the place at which the
        released code stores an entry.

        place: the order in which entries are chosen, from 0, after the sinks; older: the entries outside the window. An
        older entry that stays has its `place` as rank; a sink has its position. All other entries have NaN.
        """
        if not self.columns():
            return {}
        place = torch.where(view.positions < self.sinks, view.positions.float(), place)
        stays = older & (place < view.budget - self.window)
        return {RANK.name: torch.where(stays, place, float("nan"))}
