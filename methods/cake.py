"""cake: layers whose attention is dispersed and shifts between queries get more of the budget.

Paper: Qin et al., CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences, arXiv 2503.12491.

A is the softmax over all keys, for each of the last `window` queries and each query head; the sums below run over the
keys before the window only. C is the budget.

    layer   P = H^(1/tau1) V^(1/tau2) with H = -sum of A log A over heads, queries and keys (dispersion)
            and V = sum over heads and keys of the variance of A over the queries (shift)
    budget  L (C - window) P / (sum of P over the L layers) in addition to the window. Budget that a layer cannot fill
            goes to the other layers.
    token   mean of A over the queries + gamma * variance of A over the queries, average pooling, mean over the group

Defaults: window 32, gamma 200, kernel 5. Differences to the released code:

- It tunes tau1 and tau2 per model and budget (1.6 and 0.4 for one model); here both are 1, the code's fallback.
- It rounds layer budgets down and divides the missing entries evenly, with the remainder to the first layers
  (`rounding=official`).
- It evicts nothing from prompts of at most C + window tokens; here, of at most C.
- It has a rule for decoding, which the paper's experiments do not use (`decode=true`): every layer keeps as many
  entries as the prompt's last eviction left there, chosen by the pooled attention of the newest query.

`compat=reference` reproduces two more properties of the released code:

- While decoding, the cache stays in score order, so pooling runs over neighbours in rank.
- Lower layers are evicted before the upper layers have read the prompt. After each layer, the budget of all L layers is
  divided among the layers so far, and each of these is evicted down to its share. If a later layer cannot fill its
  budget, the rest raises the budgets of the lower layers. These cannot get evicted entries back: after the prompt they
  hold less than their budgets, which they reach while decoding. With `cascade=false`, every layer gets its final budget
  at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from kvbench.eviction.api import (
    Allocation,
    Column,
    Every,
    EveryTime,
    Method,
    Needs,
    Once,
    Protect,
    ScoreOut,
    State,
    Trigger,
    option,
)
from kvbench.eviction.planned_device import occurs
from kvbench.eviction.terms.rkv_slot_order import RANK, keep_in_score_order, slot_order
from kvbench.eviction.terms.shares import split_exactly
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("cake")
@dataclass(frozen=True)
class CAKE(Method):
    paper = "Qin et al., arXiv 2503.12491"
    # 2: compat=reference follows the released cascade; 3: chunked prompts are evicted alike with and without decode
    version = "3"
    joint = True

    window: int = option(32, "newest tokens: they always stay, and their queries vote on the prompt's entries", low=2)
    gamma: float = option(200.0, "weight, in a token's score, of the variance of its attention over the window", low=0)
    tau1: float = option(1.0, "a layer's budget grows with H^(1 / tau1); H: how dispersed its attention is", above=0)
    tau2: float = option(1.0, "a layer's budget grows with V^(1 / tau2); V: how far its attention shifts", above=0)
    kernel: int = option(5, "average-pooling width, 1 for none", low=1, odd=True)
    rounding: Literal["exact", "official"] = option(
        "exact",
        "how layer budgets become whole numbers. exact: by largest remainder; official: as in the released code",
    )
    decode: bool = option(False, "evict while decoding too, by the newest query's attention")
    compat: Literal["none", "reference"] = option(
        "none", "reproduce the released code: entries stored in score order, and the option cascade takes effect"
    )
    cascade: bool = option(
        True, "lower layers keep less, as if evicted before the upper layers are computed (compat=reference)"
    )

    def needs(self) -> Needs:
        return Needs(queries="window", window=self.window)

    def protect(self, budget: int) -> Protect:
        return Protect(recent=self.window)

    def trigger(self, interval: int) -> Trigger:
        if not self.decode:
            return Once()
        # After a cascade some layers may exceed their budgets while the mean over layers is still below the budget.
        return EveryTime(interval) if self._by_rank else Every(interval)

    def columns(self) -> tuple[Column, ...]:
        return (RANK, replace(RANK, name="old_rank")) if self._by_rank else ()

    def states(self) -> tuple[State, ...]:
        names = ("evicted_at", "entropy", "variance", "prompt", "held") if self._by_rank else ("evicted_at",)
        entries = State(name="entries", shape=("kv_heads",))
        return (entries, *(State(name=name) for name in names)) if self.decode else ()

    @property
    def _by_rank(self) -> bool:
        return self.decode and self.compat == "reference"

    def score(self, view: LayerView) -> ScoreOut:
        view = view.last_queries(self.window)  # a combined method may need more queries
        among = view.older(self.window)
        # Whether this is an eviction of the prompt, or cake's first: a combined method may have evicted the prompt.
        first = torch.ones_like(view.seen, dtype=torch.bool)
        if self.decode:
            first = (view.states["evicted_at"] == 0) | (view.seen <= view.prompt_len)
        votes = torch.zeros_like(view.positions, dtype=torch.float32)
        stats = {name: torch.zeros_like(view.seen, dtype=torch.float64) for name in ("entropy", "variance")}
        if occurs(first):
            votes, stats["entropy"], stats["variance"] = self._window(view, among)
        if not bool(first.all()):
            newest = view.last_queries(1).attend(reduce_g="mean", reduce_q="sum")
            votes = torch.where(first[:, None, None], votes, newest)
        stats["first"] = first
        if self._by_rank:
            return self._in_slot_order(view, votes, among, stats)
        states = self._share(view, first) if self.decode else {}
        stats["entries"] = states.get("entries", view.held())
        return ScoreOut(view.pool(votes, "avg", self.kernel, among), states, stats)

    def _in_slot_order(
        self, view: LayerView, votes: torch.Tensor, among: torch.Tensor, stats: dict[str, torch.Tensor]
    ) -> ScoreOut:
        """Return scores, ranks and states as in the released code, whose evictions sort a layer's entries by score."""
        states, first, held = view.states, stats["first"], view.held()
        after_prompt = (states["evicted_at"] == states["prompt"])[:, None]
        shrank = held < states["entries"] + (view.seen - states["evicted_at"])[:, None]
        sorted_ = ~first[:, None] & (after_prompt | shrank)
        rank = torch.where(sorted_[..., None], view.columns["rank"], view.columns["old_rank"])
        order = slot_order(replace(view, columns={"rank": rank}))
        score = view.pool(votes, "avg", self.kernel, among, order)
        everything = replace(view, budget=view.positions.shape[-1] + self.window)  # the layer's budget comes later
        out = keep_in_score_order(everything, score, order, self.window)
        stats |= {name: torch.where(first, stats[name].float(), states[name]) for name in ("entropy", "variance")}
        stats["prompt"] = torch.where(first, view.seen.float(), states["prompt"])
        stats["held"] = torch.where(first, held.amin(dim=-1).float(), states["held"])
        new = {"entries": held.float(), "evicted_at": view.seen.float()}
        new |= {name: stats[name] for name in ("entropy", "variance", "prompt", "held")}
        # No state is stored while the entries of all layers fit the budget.
        layers = view.held_by_layer
        stats["fits"] = first & ((view.seen if not layers else sum(layers) / len(layers)) <= view.budget)
        new = {
            name: torch.where(stats["fits"].view(-1, *[1] * (x.dim() - 1)), states[name], x) for name, x in new.items()
        }
        return ScoreOut(out.score, out.columns | {"old_rank": rank} | new, stats)

    def _window(self, view: LayerView, among: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the window's votes [b, Hk, N], not pooled, and the layer's dispersion H and shift V, [b] each."""
        heads = view.keys.shape[1]
        group = view.queries.shape[1] // heads
        scores = []
        entropy = variance = torch.zeros_like(view.seen, dtype=torch.float64)
        for head in range(heads):  # one head at a time bounds memory: attention rows of a long prompt are large
            h = slice(head, head + 1)
            one = replace(
                view,
                keys=view.keys[:, h],
                positions=view.positions[:, h],
                valid=view.valid[:, h],
                queries=view.queries[:, head * group : (head + 1) * group],
            )
            rows = one.attend(reduce_g=None, reduce_q=None)  # [b, 1, g, w, N]
            rows = torch.where(among[:, h, None, None], rows, 0.0)
            shift = rows.var(dim=-2)
            scores.append((rows.mean(dim=-2) + self.gamma * shift).mean(dim=2))
            # Sums in float64, so that budgets do not depend on the order of the entries.
            entropy = entropy - (rows * (rows + 1e-10).log()).sum(dim=(1, 2, 3, 4), dtype=torch.float64)
            variance = variance + shift.sum(dim=(1, 2, 3), dtype=torch.float64)
        return torch.cat(scores, dim=1), entropy, variance

    def _share(self, view: LayerView, first: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the states that the layer stores after an eviction: entries per head, and tokens read so far.

        Every eviction while decoding leaves as many entries in each head as the one before. An eviction of the prompt
        does not know this number yet, so it stores 0; the next one counts it. first: as in `score`.
        """
        known = view.states["entries"]
        left = view.held() - (view.seen - view.states["evicted_at"])[:, None]
        entries = torch.where(known > 0, known, left)
        return {"entries": torch.where(first[:, None], 0.0, entries), "evicted_at": view.seen.float()}

    def quotas(self, allocation: Allocation) -> torch.Tensor:
        stats, held = allocation.stats, allocation.held
        first = stats["first"][:, :, None]
        preference = stats["entropy"].double() ** (1 / self.tau1) * stats["variance"].double() ** (1 / self.tau2)
        spare = (allocation.budget - self.window) * len(allocation.layers)
        room = (held.amin(dim=-1) - self.window).clamp_min(0)
        if self._by_rank:
            room = (stats["held"].long() - self.window).clamp_min(0)
        final = self._split(preference, spare, room)
        each = final[:, :, None].expand(held.shape) + self.window
        if self.compat == "reference" and self.cascade:
            early = self._cascade(preference, spare, room, final)[:, :, None] + self.window
            each = torch.where(first, early, each)
        if self._by_rank:
            return torch.where(stats["fits"][:, :, None], held, each)
        return torch.where(first, each, stats["entries"].long())

    def _split(self, preference: torch.Tensor, spare: int, room: torch.Tensor) -> torch.Tensor:
        """Divide `spare` entries among layers in proportion to `preference` [b, L], at most `room` [b, L] per layer. If
        all preferences are 0, the layers get equal shares."""
        total = preference.sum(dim=1, keepdim=True)
        share = torch.where(total > 0, preference / total, 1 / preference.shape[1])
        return (
            _official(share * spare, spare, room)
            if self.rounding == "official"
            else split_exactly(share * spare, spare, 0, room)
        )

    def _cascade(self, preference: torch.Tensor, spare: int, room: torch.Tensor, final: torch.Tensor) -> torch.Tensor:
        """Return how many entries of each layer are left after the cascade's evictions, without the window, [b, L].
        final: the layers' budgets after the whole prompt; the other arguments as in `_split`."""
        least = final.clone()
        for read in range(1, preference.shape[1]):
            part = self._split(preference[:, :read], spare, room[:, :read])
            least[:, :read] = torch.minimum(least[:, :read], part)
        return least


def _official(ideal: torch.Tensor, total: int, room: torch.Tensor) -> torch.Tensor:
    """Return integers near the `ideal` numbers of entries per layer [b, L], at most `room`, with a sum up to `total`.

    Numbers are rounded down and cut to `room`. Then the entries that were cut, and after them the entries that are
    still missing, are divided evenly among the layers with room; a remainder goes to the first of these layers.
    Finally, layers above `room` are cut to `room` again. So the sum may be below `total`.
    """
    each = torch.minimum(ideal.long(), room)
    cut = (ideal.long() - each).sum(dim=1)
    for missing in (cut, None):
        missing = total - each.sum(dim=1) if missing is None else missing
        open_ = each < room
        members = open_.sum(dim=1).clamp_min(1)
        first = open_ & (open_.cumsum(dim=1) <= (missing % members)[:, None])
        each = each + torch.where(open_, (missing // members)[:, None], 0) + first.long()
    return torch.minimum(each, room)
