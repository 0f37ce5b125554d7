"""snapkv-decode: SnapKV's vote of the last queries, taken again at every eviction while decoding.

Paper: Li et al., SnapKV: LLM Knows What You Are Looking For Before Generation, arXiv 2404.14469 (for prompts only).

Two repositories published different decoding forms, so results must name the variant:

    rkv  logits, max over the group, softmax over the keys before the window, mean over the window, max pooling
         (Zefan-Cai/R-KV; also the baseline of ForesightKV). Defaults: window 8, kernel 7.
    gkv  softmax over all keys, max over the group, mean over the window, max pooling
         (microsoft/G-KV). Defaults: window 16, kernel 5.

The window always stays. Pooling runs along the text. `compat=reference` reproduces the R-KV code. That code stores
entries in score order, so that from the second eviction on it pools over neighbours in rank. It also reorders the
entries at a tick at which the cache holds exactly its budget and nothing is dropped. `global_score=max|mean|sum` ranks
by the global score of G-KV instead (`kvbench.eviction.terms.window_vote`). This score is stored unpooled, and is pooled
for ranking only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvbench.eviction.api import ScoreOut, option
from kvbench.eviction.options import OptionError
from kvbench.eviction.terms.window_vote import WindowVote, normalised, rkv_votes
from kvbench.eviction.view import LayerView
from kvbench.registry import methods


@methods.register("snapkv-decode")
@dataclass(frozen=True)
class SnapKVDecode(WindowVote):
    paper = "Li et al., arXiv 2404.14469; decoding forms of arXiv 2505.24133 (rkv) and 2512.00504 (gkv)"
    stacked = True

    variant: Literal["rkv", "gkv"] = option("rkv", "repository whose decoding form is used")
    window: int | None = option(
        None, "newest tokens: their queries vote, and they always stay; none: 8 (rkv) or 16 (gkv)", low=1
    )
    kernel: int | None = option(None, "width of max pooling; 1: no pooling; none: 7 (rkv) or 5 (gkv)", low=1, odd=True)
    compat: Literal["none", "reference"] = option(
        "none", "reproduce the R-KV code: entries stored in score order (rkv only)"
    )
    global_score: Literal["none", "max", "mean", "sum"] = option(
        "none", "merge the vote with earlier votes, as gkv does"
    )
    alpha: float = option(0.8, "decay of an entry's earlier score, for global_score", above=0, high=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compat == "reference" and self.variant != "rkv":
            raise OptionError("compat", "is for variant=rkv; the code of variant gkv keeps its entries in text order.")

    @property
    def voters(self) -> int:
        return self.window or {"rkv": 8, "gkv": 16}[self.variant]

    def score(self, view: LayerView) -> ScoreOut:
        among, order = view.older(self.voters), self.order(view)
        votes = rkv_votes(view) if self.variant == "rkv" else view.attend(reduce_g="max", reduce_q="mean")
        votes, columns = self.remember(view, normalised(votes, among) if self.memory else votes, among)
        kernel = self.kernel or {"rkv": 7, "gkv": 5}[self.variant]
        return self.ranked(view, view.pool(votes, "max", kernel, among, order), order, columns)
