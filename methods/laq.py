"""laq: the queries of a short draft vote for the prompt's entries (Lookahead Q-Cache).

Paper: Wang et al., Lookahead Q-Cache: Achieving More Consistent KV Cache Eviction via Pseudo Query, arXiv 2505.20334.

The method `inner` evicts a copy of the prompt's cache to the budget. From the copy the model drafts `n` tokens
greedily; the first is the greedy next token under the full cache, and a stop token does not end the draft. The queries
of the draft and of the last `w2` prompt tokens score the full prompt:

    score_j = maxpool( sum over these queries of the group's mean of softmax over the prompt's keys )

The draft is then dropped, and generation starts from the evicted prompt. The last `w2` tokens stay. Defaults: n 8, w2 8
(the paper's LAQ++; `w2=0` is LAQ), kernel 7, inner SnapKV with a window of 32.

The released code keeps separate entries for every query head. It also hides the prompt's last keys from drafted
queries, as if they were the draft's keys; here drafted queries see the whole prompt.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from kvbench.errors import quote
from kvbench.eviction.api import Column, Method, Needs, Once, Probe, Prompt, Protect, Trigger, option
from kvbench.eviction.choose import from_label
from kvbench.eviction.delegate import named
from kvbench.eviction.options import OptionError
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("laq", aliases=("lookahead-q-cache",))
@dataclass(frozen=True)
class LAQ(Method):
    paper = "Wang et al., arXiv 2505.20334"
    kind = "probes"

    n: int = option(8, "drafted tokens whose queries vote", low=1)
    inner: str = option(
        "snapkv", "method that evicts from the draft's copy of the prompt's cache, as NAME(OPTION=VALUE)"
    )
    w2: int = option(8, "last tokens of the prompt: their queries vote too, and they always stay", low=0)
    kernel: int = option(7, "max-pooling width, 1 for none", low=1, odd=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        inner = named("inner", self.inner, lambda: self._inner)
        needs = inner.needs()
        apart = needs.queries != "since_last" and not (needs.probes or inner.columns() or inner.states())
        if not (inner.takes_budget and apart) or inner.weights() is not None or inner.per_query_head:
            raise OptionError(
                "inner",
                "must name a method that takes a budget, keeps entries per KV head, reads only the newest queries, and "
                f"needs no columns, states, probes or weights; got {quote(self.inner)}.",
            )

    @cached_property
    def _inner(self) -> Method:
        return from_label(self.inner)

    def needs(self) -> Needs:
        inner = self._inner.needs()
        window = max(self.w2, inner.width)  # `inner` reads the queries that the engine keeps for laq
        kind: Literal["window", "none"] = "window" if window else "none"
        return replace(inner, queries=kind, window=window, probes=True)

    def columns(self) -> tuple[Column, ...]:
        return (Column(name="laq"),)

    def protect(self, budget: int) -> Protect:
        return Protect(recent=self.w2)

    def summed(self, view: LayerView) -> int:
        return self.n + self.w2

    def trigger(self, interval: int) -> Trigger:
        return Once()

    def probes(self, prompt: Prompt) -> Generator[Probe, int, None]:
        inner, token = self._inner, prompt.next_token
        for _ in range(self.n):
            token = yield Probe(tokens=(token,), against=inner, keep=True)

    def observe(self, view: LayerView) -> dict[str, torch.Tensor]:
        prompt = replace(view, probe_keys=None, probe_positions=None)  # leave drafted keys out of the softmax
        return {"laq": view.columns["laq"] + prompt.attend(reduce_g="mean", reduce_q="sum")}

    def score(self, view: LayerView) -> torch.Tensor:
        votes = view.columns["laq"]
        if self.w2:
            votes = votes + view.last_queries(self.w2).attend(reduce_g="mean", reduce_q="sum")
        return view.pool(votes, "max", self.kernel, view.older(self.w2))

    def min_budget(self) -> int:
        return max(super().min_budget(), self._inner.min_budget())
