"""morphkv: a cache of constant size; the window before the current token votes for older tokens.

Paper: Ghadia et al., Dialogue Without Limits: Constant-Sized KV Caches for Extended Responses in LLMs,
arXiv 2503.00979.

The current token and the `window` tokens before it always stay. The queries of these `window` tokens vote for all older
entries:

    llama    softmax, over the older keys, of the logits summed over the group, as in the released Llama file
    mistral  softmax over the older keys for each query head, then the group's maximum, as in the Mistral file

`fuse` sums the votes or takes their maximum. kvbench computes the votes at an eviction, over the older keys that are
left. The released code stores a voter's logits when the voter is generated. These logits give the same votes, because
all keys that are left were in the cache then.

Defaults: window 32, fuse sum; the paper's tasks use windows of 30 to 200, both values of `fuse`, and an eviction at
every step (interval 1). The released code keeps one entry more than its capacity; kvbench's budget counts every entry.
With grouped queries the Llama file prunes stored logits per query head but keys per KV head. So after the first
eviction, its logits no longer belong to its keys. In the Mistral file one voter is missing: `voters=W-1` reproduces
this for a window of W.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from kvbench.eviction.api import Method, Needs, Protect, option
from kvbench.eviction.options import OptionError
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("morphkv")
@dataclass(frozen=True)
class MorphKV(Method):
    paper = "Ghadia et al., arXiv 2503.00979"
    stacked = True

    window: int = option(32, "tokens before the current one that always stay and vote", low=1)
    fuse: Literal["sum", "max"] = option("sum", "how the votes of the window are merged")
    form: Literal["llama", "mistral"] = option(
        "llama",
        "how the query heads of a group become one vote. llama: softmax of their summed logits; mistral: largest of "
        "their softmaxes",
    )
    voters: int | None = option(None, "how many tokens before the current one vote; none: the window", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.voters is not None and self.voters > self.window:
            raise OptionError("voters", f"must be at most the window, {self.window}; got {self.voters}.")

    def needs(self) -> Needs:
        return Needs(queries="window", window=self._voters + 1, keys=False)

    def protect(self, budget: int) -> Protect:
        return Protect(recent=self.window + 1)

    def unscored(self) -> int:
        return self.window + 1  # even if fewer of them vote

    def summed(self, view: LayerView) -> int:
        return self._voters if self.fuse == "sum" else 1

    def score(self, view: LayerView) -> torch.Tensor:
        last = view.last_queries(self._voters + 1)
        window = replace(last, queries=last.queries[:, :, :-1], query_positions=last.query_positions[:, :-1])
        llama = self.form == "llama"
        return window.attend(
            order="group_then_softmax" if llama else "softmax_then_group",
            reduce_g="sum" if llama else "max",
            reduce_q=self.fuse,
            among=view.older(self.window + 1),
        )

    @property
    def _voters(self) -> int:
        return self.window if self.voters is None else self.voters
