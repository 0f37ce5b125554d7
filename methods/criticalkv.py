"""criticalkv: keep some entries by the scores of `base`, the others by score times the norm of the projected value.

Paper: Feng et al., Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective,
arXiv 2502.03805.

Another method, `base`, gives the scores, the protected entries and the time of eviction. Two stages bound how much
eviction changes the output of attention. With C_h entries for head h:

    stage 1   int(rho C_h) entries stay: the protected entries, then those with the best scores
    stage 2   the others compete by (score + epsilon) * n_j,   n_j = mean over the group of |v_j W_O^h|_1

W_O^h is the part of the layer's output projection that reads query head h. n_j is computed once, when a token is read.

`ada=true` is Ada-CriticalKV: the heads of a layer share its budget as in ada-kv (floor=guarantee, normalize=false), by
the scores of `base` alone; the norms choose within a head. Stage 1 then keeps at least int(floor_alpha C) entries.
A base may give heads or layers different budgets, as ada-kv and pyramidkv do. A base that decides on the entries of
several layers together, such as headkv, is refused.

Defaults: rho 0.5, epsilon 1e-4, floor_alpha 0.2 as in paper and kvpress; window 32 as in the authors' code (kvpress
64). As in kvpress, epsilon is added to an entry's mean score per query: a base's score that is a sum over the queries
of a window, such as snapkv's, is divided by their number. The lowest score of the layer is subtracted from all, because
scores may be negative.

Traps: if rho C_h is at most the window, stage 1 chooses no entry beside the protected ones; with
`window_in_stage1=false`, stage 1 keeps int(rho C_h) entries beside them, but at most C_h in all. Epsilon is as large as
the scores of long prompts, so it decides among tokens with little attention. If a layer gates the output of attention,
the norm ignores the gate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from kvbench.eviction import returned
from kvbench.eviction.api import Column, Method, Needs, ScoreOut, option
from kvbench.eviction.delegate import check_base, delegate, wrapped
from kvbench.eviction.new_tokens import NewTokens
from kvbench.eviction.select import allocation_of, competing, keep_mask
from kvbench.eviction.terms.rkv_slot_order import RANK
from kvbench.eviction.terms.value_norm import VALUE_NORM, projected_norms
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("criticalkv")
@dataclass(frozen=True)
class CriticalKV(Method):
    paper = "Feng et al., arXiv 2502.03805"
    version = "3"  # 3: shares of a `base` such as pyramidkv fill the budget on prompts in chunks

    base: str = option("snapkv(kernel=5, pool=avg)", "the method that scores, with its options in brackets")
    rho: float = option(0.5, "share of a head's budget that the base's scores alone decide", low=0, high=1)
    epsilon: float = option(1e-4, "added to an entry's mean score per query before the norm multiplies it", low=0)
    window_in_stage1: bool = option(True, "protected entries count towards the share rho")
    ada: bool = option(False, "the heads of a layer share the layer's budget, as in ada-kv")
    floor_alpha: float = option(0.2, "share of the budget that every head keeps at least (ada=true)", low=0, high=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_base(
            self,
            (lambda inner: not inner.takes_budget, "a method with a budget"),
            (
                lambda inner: inner.scope != "head" or inner.joint,
                "a method that sets each head's budget within its layer",
            ),
            (
                lambda inner: not {VALUE_NORM, RANK}.isdisjoint(inner.columns()),
                "a method other than criticalkv that scores every entry",
            ),
        )

    @cached_property
    def inner(self) -> Method:
        """The method that the option `base` names; if `ada` is true, ada-kv around this method."""
        options = f"floor=guarantee, normalize=false, floor_alpha={self.floor_alpha}"
        return wrapped(f"ada-kv(base={self.base}, {options})" if self.ada else self.base, self.protection)

    def needs(self) -> Needs:
        return replace(self.inner.needs(), layer_weights=("o_proj",))

    def columns(self) -> tuple[Column, ...]:
        return (*self.inner.columns(), VALUE_NORM)

    def on_tokens(self, new: NewTokens) -> dict[str, torch.Tensor]:
        given = self.inner.on_tokens(new) if self.inner.reads_tokens else {}
        return given | {VALUE_NORM.name: projected_norms(new)}

    def score(self, view: LayerView) -> ScoreOut:
        out, free = returned.scored(self.inner, "score", self.inner.score(view), view), competing(self, view)
        votes = torch.where(free, out.score.float(), 0.0)
        first = keep_mask(votes, view.positions, view.valid, view.valid & ~free, self._first(view, out, free))
        votes = votes - torch.where(votes.isfinite(), votes, 0.0).amin(dim=(1, 2), keepdim=True)
        votes = votes.clamp(0.0, torch.finfo(votes.dtype).max) / self.inner.summed(view)
        score = (votes + self.epsilon) * torch.where(free, view.columns[VALUE_NORM.name], 0.0)
        return ScoreOut(score.masked_fill(first, float("inf")), out.columns, out.stats)

    def _first(self, view: LayerView, out: ScoreOut, free: torch.Tensor) -> torch.Tensor:
        """Return how many entries of each head stage 1 keeps, protected entries included, [b, Hk] int64. out: the
        base's scores; free: mask of the entries that are not protected."""
        held = view.held()
        quotas = None if self.inner.uniform else returned.quotas_of(self.inner, allocation_of([view], [out]))
        kept = held.clamp(max=view.budget) if quotas is None else view.per_row(quotas)
        least = max(1, int(view.budget * self.floor_alpha)) if self.ada else 0
        count = (kept.double() * self.rho).long().clamp(min=least)
        beside = 0 if self.window_in_stage1 else held - free.sum(dim=-1)
        return (count + beside).minimum(kept)


# All else is as `base` declares it.
delegate(CriticalKV, "quotas", "selector", "scope", "joint", "uniform")
