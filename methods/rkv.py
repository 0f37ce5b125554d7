"""rkv: keep entries that recent queries attend to and whose keys do not repeat other keys.

Paper: Cai et al., R-KV: Redundancy-aware KV Cache Compression for Reasoning Models, arXiv 2505.24133.

Score: lam I_j - (1 - lam) R_j. I is the vote of `snapkv-decode` (variant rkv). R is the redundancy: the softmax over
all keys j of the mean cosine similarity between key j and every other key i. But each key i spares the most
recent key j that is similar to it (cosine > threshold), if there is one: in j's mean this similarity counts as 0.
Defaults: window 8, kernel 7, threshold 0.5, lam 0.1 as in the README (the released class and script have 0.07).

In the paper similarities below the threshold count as 0. In the released code and here they count in full, and a key
spares at most one other key. `compat=reference` reproduces the rest of the code:

- The cache stays in score order, so pooling and "most recent" go by rank.
- A key without a similar key spares the first entry of the cache.
- The method also runs when the cache holds exactly its budget.

Not reproduced: the code scores every sequence of a batch with the redundancy of the first sequence.

`global_score=max|mean|sum` replaces I by the global score of G-KV (`kvbench.eviction.terms.window_vote`), pooled. The
global score is at most about 1 per entry, but R sums to 1 over a head. So R is divided by its maximum in the head, as
in G-KV.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvbench.eviction.api import ScoreOut, option
from kvbench.eviction.terms.redundancy import redundancy
from kvbench.eviction.terms.window_vote import WindowVote, normalised, rkv_votes
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("rkv", aliases=("r-kv",))
@dataclass(frozen=True)
class RKV(WindowVote):
    paper = "Cai et al., arXiv 2505.24133"
    stacked = True

    window: int = option(8, "newest tokens: their queries vote, and they always stay", low=1)
    kernel: int = option(7, "max-pooling width, 1 for none", low=1, odd=True)
    lam: float = option(0.1, "weight of attention; 1 - lam is the weight of redundancy", low=0, high=1)
    threshold: float = option(0.5, "cosine above which two keys count as similar", low=0, high=1)
    spare: Literal["last", "first"] = option(
        "last",
        "which of the keys similar to a key gets cosine 0 with this key: the newest (last) or the oldest (first)",
    )
    compat: Literal["none", "reference"] = option(
        "none",
        "reproduce the released code: entries stored in score order; if a key has no similar key, its cosine with the "
        "first entry is overwritten by 0",
    )
    global_score: Literal["none", "max", "mean", "sum"] = option(
        "none", "merge the vote with earlier votes, as gkv does"
    )
    alpha: float = option(0.8, "decay of an entry's earlier score, for global_score", above=0, high=1)

    def score(self, view: LayerView) -> ScoreOut:
        among, order = view.older(self.window), self.order(view)
        votes = rkv_votes(view)
        repeats = redundancy(view, self.threshold, order, spare=self.spare, column_zero=self.by_rank)
        if self.memory:
            votes, repeats = normalised(votes, among), normalised(repeats, among)
        votes, columns = self.remember(view, votes, among)
        importance = view.pool(votes, "max", self.kernel, among, order)
        score = torch.where(among, self.lam * importance - (1 - self.lam) * repeats, float("-inf"))
        return self.ranked(view, score, order, columns)
