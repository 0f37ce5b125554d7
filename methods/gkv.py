"""gkv: a global score that remembers attention from earlier evictions, minus redundancy.

Paper: Liao et al., G-KV: Decoding-Time KV Cache Eviction with Global Attention, arXiv 2512.00504.

Local score (Eq. 1-2): softmax over all keys, max over the group, mean over the window, divided by its head's maximum.
The global score F (Eq. 3-5) merges the local score with the entry's global score at the previous eviction, by one of
the forms of `kvbench.eviction.terms.window_vote`. Ranking: lam F_j - (1 - lam) R_j, where R is R-KV's redundancy
divided by its maximum in a head.

Defaults: window 16, form max, alpha 0.8, lam 0.5, as in the released scripts (the released class has window 8 and lam
0.1). Other forms of the released code are options:

    redundancy=false  ranks by F alone
    kernel            pools F for ranking only (SnapKV + global)
    gamma             adds gamma * std over the window's queries to the local score ("attention shift", after CAKE; the
                      code uses gamma 200)
    form=local        keeps no memory; with norm=false it gives the code's plain local score

The default follows the released Triton kernel. `compat=reference` follows the released PyTorch code, which differs in
one point: for a key without a similar key, the similarity to entry 0 is replaced by 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvbench.eviction.api import ScoreOut, option
from kvbench.eviction.options import OptionError
from kvbench.eviction.terms.redundancy import redundancy
from kvbench.eviction.terms.window_vote import WindowVote, normalised
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("gkv", aliases=("g-kv",))
@dataclass(frozen=True)
class GKV(WindowVote):
    paper = "Liao et al., arXiv 2512.00504"
    stacked = True

    window: int = option(16, "newest tokens: their queries vote, and they always stay", low=1)
    form: Literal["max", "mean", "sum", "local"] = option(
        "max",
        "score F from local score s and from F' at the previous eviction. max: the larger of alpha F' and s; "
        "mean: alpha F' + (1 - alpha) s; sum: alpha F' + s; local: s. Without an F', F is s",
    )
    alpha: float = option(0.8, "factor of an entry's score at the previous eviction", above=0, high=1)
    lam: float = option(0.5, "weight of the global score; 1 - lam is the weight of redundancy", low=0, high=1)
    redundancy: bool = option(True, "subtract the redundancy of keys")
    threshold: float = option(0.5, "cosine above which two keys count as similar", low=0, high=1)
    kernel: int = option(1, "max-pooling width for ranking, 1 for none", low=1, odd=True)
    norm: bool = option(True, "divide local score and redundancy by their maximum in the head")
    gamma: float = option(
        0.0, "weight, in the local score, of the attention's standard deviation over the window", low=0
    )
    compat: Literal["none", "reference"] = option(
        "none",
        "reproduce the released PyTorch code: if a key has no similar key, its cosine with the first entry becomes 0",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gamma and self.window < 2:
            raise OptionError("gamma", "needs a window of 2 or more; one query has no standard deviation.")

    @property
    def memory(self) -> tuple[str, float] | None:
        return None if self.form == "local" else (self.form, self.alpha)

    @property
    def by_rank(self) -> bool:
        return False  # G-KV's code stores entries in text order

    def score(self, view: LayerView) -> ScoreOut:
        among, order = view.older(self.window), view.text_order()
        score, columns = self.remember(view, self._local(view, among), among)
        if self.kernel > 1:
            score = view.pool(score, "max", self.kernel, among, order)
        if self.redundancy:
            repeats = redundancy(view, self.threshold, order, column_zero=self.compat == "reference")
            score = self.lam * score - (1 - self.lam) * self._normalised(repeats, among)
        return ScoreOut(torch.where(among, score, float("-inf")), columns)

    def _local(self, view: LayerView, among: torch.Tensor) -> torch.Tensor:
        if self.gamma == 0:
            return self._normalised(view.attend(reduce_g="max", reduce_q="mean"), among)
        rows = view.attend(reduce_g="max", reduce_q=None)  # [b, Hk, w, N]
        return self._normalised(rows.mean(dim=-2) + self.gamma * rows.std(dim=-2), among)

    def _normalised(self, x: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
        return normalised(x, among) if self.norm else x
