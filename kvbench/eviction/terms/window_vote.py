"""Base of rkv, snapkv-decode and gkv: at every eviction the newest tokens' queries vote for the older entries.

The entries of the newest tokens (the window) always stay. A method may merge the vote with earlier votes, by the
global score of G-KV (arXiv 2512.00504, Eq. 3-5). The local score of entry j is its vote, divided by the largest vote
in its head. F'_j is the entry's global score at the previous eviction. The new global score F_j merges the two:

    max   F_j = max(alpha F'_j, local_j)
    mean  F_j = alpha F'_j + (1 - alpha) local_j
    sum   F_j = alpha F'_j + local_j

For entries without F'_j, F_j is local_j: these entries were in the window at the previous eviction, or are newer. F is
stored for the entries outside the window, before F is pooled or combined with redundancy.
"""

from __future__ import annotations

from kvbench.eviction.api import Column, Every, Method, Needs, Protect, ScoreOut, Trigger
from kvbench.eviction.options import OptionError
from kvbench.eviction.terms.rkv_slot_order import RANK, keep_in_score_order, slot_order
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch

MEMORY = Column(name="memory", init=float("nan"))


def normalised(x: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """Return scores [b, Hk, N] divided by their head's maximum over the entries in `among`; zeros stay zeros."""
    return x / x.masked_fill(~among, 0.0).amax(dim=-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)


def rkv_votes(view: LayerView) -> torch.Tensor:
    """Return the vote of R-KV's code (arXiv 2505.24133), [b, Hk, N] before pooling."""
    return view.attend(domain="outside_window", order="group_then_softmax", reduce_g="max", reduce_q="mean")


class WindowVote(Method):
    """Base of methods in which the newest queries (the window) vote for entries. Subclasses define the options."""

    window: int | None
    compat: str
    global_score: str = "none"
    alpha: float

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, given in (("protection", self.replaced), ("global_score", self.memory)):
            if given and self.by_rank:
                raise OptionError(
                    option,
                    "is not in the code that compat=reference reproduces; leave out this option or compat=reference.",
                )

    @property
    def voters(self) -> int:
        assert self.window is not None
        return self.window

    @property
    def memory(self) -> tuple[str, float] | None:
        """The form (max, mean or sum) and alpha of the global score; None if votes are not merged with earlier ones."""
        return (self.global_score, self.alpha) if self.global_score != "none" else None

    @property
    def by_rank(self) -> bool:
        """Whether entries are stored in score order, as in R-KV's code. If so, the method also runs at a tick at which
        the sequence holds exactly its budget."""
        return self.compat == "reference"

    def needs(self) -> Needs:
        return Needs(queries="window", window=self.voters, keys=False)

    def protect(self, budget: int) -> Protect:
        return Protect(recent=self.voters)

    def columns(self) -> tuple[Column, ...]:
        if self.memory:
            return (MEMORY,)
        return (RANK,) if self.by_rank else ()

    def trigger(self, interval: int) -> Trigger:
        return Every(interval, at_budget=self.by_rank)

    def remember(
        self, view: LayerView, local: torch.Tensor, among: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the global score F, and the columns that store F for the entries in `among`.

        F merges the local score with F', the global score at the previous eviction. If `memory` is None, F is the local
        score, and no columns are returned.
        """
        if self.memory is None:
            return local, {}
        (form, alpha), before = self.memory, view.columns[MEMORY.name]
        if form == "max":
            merged = torch.maximum(alpha * before, local)
        else:
            merged = alpha * before + local * (1 - alpha if form == "mean" else 1)
        score = torch.where(before.isnan(), local, merged)
        return score, {MEMORY.name: torch.where(among, score, float("nan"))}

    def order(self, view: LayerView) -> torch.Tensor:
        """Return the order in which pooling sees the entries, as indices [b, Hk, N]. This is text order, or with
        `by_rank` the storage order of the released code."""
        return slot_order(view) if self.by_rank else view.text_order()

    def ranked(
        self, view: LayerView, score: torch.Tensor, order: torch.Tensor, columns: dict[str, torch.Tensor]
    ) -> ScoreOut:
        return keep_in_score_order(view, score, order, self.voters) if self.by_rank else ScoreOut(score, columns)
