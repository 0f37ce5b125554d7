"""rpc: reasoning path compression; it first evicts the generated tokens for which the newest tokens vote least.

Paper: Song et al., Reasoning Path Compression: Compressing Generation Trajectories for Efficient LLM Reasoning,
arXiv 2505.13866.

Score of the generated tokens older than the newest R: softmax over these tokens, summed over the newest R queries
(`selectors=new`: the newest query only), mean over all query heads (`aggregate=group`: over the group), then pooling.
With `aggregate=all` every head of a layer keeps the same generated tokens. The newest R always stay.
The option `form` says when tokens are evicted:

    native  the paper's schedule: the first eviction after P + R generated tokens, then one every P tokens. Eviction
            n = 0, 1, ... keeps the prompt, (n + 1) P / c generated tokens and the newest R. The cache grows without
            bound; the method takes no budget and ignores the interval.
    fixed   a budget, at the run's interval. Generated tokens are evicted first. Prompt entries are evicted only if the
            prompt and the newest R tokens together exceed the budget, by the same vote among prompt entries.

Defaults as in the released library: P 1024, R 32, c 4, average pooling of width 7. The released code stores the newest
R - 1 queries and counts the newest of them twice: `compat=reference`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from kvbench.eviction.api import Every, Method, Needs, Protect, Trigger, option
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods

# Powers of two scale without rounding; they put votes for generated tokens below every vote for the prompt.
GENERATED, PROMPT = 2.0**-64, 2.0**-40


@methods.register("rpc")
@dataclass(frozen=True)
class RPC(Method):
    paper = "Song et al., arXiv 2505.13866"
    stacked = True

    form: Literal["fixed", "native"] = option(
        "fixed", "fixed: evict to a budget; native: the paper's schedule without a budget, the cache grows"
    )
    P: int = option(1024, "generated tokens between two evictions (form=native)", low=1)
    R: int = option(32, "newest tokens: their queries vote, and they always stay", low=1)
    c: float = option(4.0, "one of every c generated tokens stays (form=native)", low=1)
    kernel: int = option(7, "pooling width, 1 for none", low=1, odd=True)
    pool: Literal["avg", "max"] = option("avg", "kind of pooling")
    aggregate: Literal["all", "group"] = option(
        "all", "votes are averaged over all query heads of a layer (all), or over each group (group)"
    )
    selectors: Literal["recent", "new"] = option(
        "recent", "the newest R queries vote (recent), or only the newest query (new)"
    )
    compat: Literal["none", "reference"] = option("none", "count the newest query twice, as the released code does")

    def needs(self) -> Needs:
        return Needs(queries="window", window=self.R if self.selectors == "recent" else 1, keys=False)

    def protect(self, budget: int) -> Protect:
        return Protect(recent=self.R, prompt=self.form == "native")

    def unscored(self) -> int:
        return self.R  # whichever of their queries vote

    def summed(self, view: LayerView) -> int:
        return self.needs().window

    def trigger(self, interval: int) -> Trigger:
        return Every(self.P, after=self.R) if self.form == "native" else Every(interval)

    def allowed(self, budget: int | None, prompt_len: int, seen: int, evictions: int) -> int:
        if self.form == "fixed":
            return super().allowed(budget, prompt_len, seen, evictions)
        # Compute n from the tokens: with c = 1 no entry is dropped, so `evictions` would not count.
        compressions = max(0, (seen - prompt_len - self.R) // self.P)
        return prompt_len + compressions * int(self.P / self.c) + self.R

    @property
    def takes_budget(self) -> bool:
        return self.form == "fixed"

    decode_bounded = takes_budget

    def score(self, view: LayerView) -> torch.Tensor:
        older, prompt = view.older(self.R), view.positions < view.prompt_len[:, None, None]
        voters = view.last_queries(self.needs().window)  # a combined method may need more queries
        if self.compat == "reference" and self.selectors == "recent":
            last = [voters.queries[:, :, 1:], voters.queries[:, :, -1:]]
            at = [voters.query_positions[:, 1:], voters.query_positions[:, -1:]]
            voters = replace(voters, queries=torch.cat(last, dim=2), query_positions=torch.cat(at, dim=1))
        generated = self._votes(voters, older & ~prompt)
        if self.form == "native":
            return generated
        return torch.where(prompt, self._votes(voters, older & prompt).clamp_min(PROMPT), generated * GENERATED)

    def _votes(self, view: LayerView, among: torch.Tensor) -> torch.Tensor:
        """Return the newest queries' pooled votes [b, Hk, N]; the softmax runs over the entries in the mask `among`."""
        votes = view.attend(reduce_g="mean", reduce_q="sum", among=among)
        if self.aggregate == "all":
            votes = _mean_over_heads(votes, view.positions, among, view.longest)
        return view.pool(votes, self.pool, self.kernel, among)


def _mean_over_heads(votes: torch.Tensor, positions: torch.Tensor, among: torch.Tensor, end: int) -> torch.Tensor:
    """Return for each entry the mean, over all heads, of the votes [b, Hk, N] for its token. The heads may store the
    entries of one token at different places. end: a number above all positions."""
    b, heads, _ = votes.shape
    at = torch.where(among, positions, end)  # all others share an unused column
    by_token = votes.new_zeros(b, heads, end + 1).scatter_(-1, at, votes)
    mean = by_token[:, 0]
    for head in range(1, heads):  # in a fixed order, so that the last bits are equal everywhere
        mean = mean + by_token[:, head]
    return (mean / heads)[:, None].expand(-1, heads, -1).gather(-1, at)
