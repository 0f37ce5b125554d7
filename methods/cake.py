"""cake: layers share the budget by how spread out and how unsteady their attention is.

Paper: Qin et al., CAKE: Cascading and Adaptive KV Cache Eviction with Layer Preferences, arXiv 2503.12491.

A = softmax over all keys for each of the last `window` queries and each query head, columns before the window only.

    layer   P = H^(1/tau1) V^(1/tau2) with H = -sum of A log A over heads, queries and columns (dispersion)
            and V = sum over heads and columns of the variance of A over the queries (shift)
    budget  (C - window) P / sum of P for each layer, in the mean over layers; no layer gets more than it has, and what
            it leaves is spread over the others. The window comes on top.
    token   mean of A over the queries + gamma * its variance, average pooling, mean over the group

Defaults: window 32, gamma 200, kernel 5. The released code tunes tau1 and tau2 for each model and budget (1.6 and 0.4
for one of them); here both are 1, its fallback. It evicts lower layers while it still reads the prompt in upper ones,
with the same result.

The released code rounds layer budgets down and gives what is missing to the first layers (`rounding=official`), and
leaves prompts alone that are less than a window longer than the budget. It also holds a rule for decoding, which its
experiments do not use (`decode=true`): every layer keeps its number of entries, by the pooled attention of the newest
query. There slots stay in score order, so pooling runs over neighbours in rank: `compat=reference`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from kvbench.eviction.api import (
    Allocation,
    Column,
    Every,
    Method,
    Needs,
    Once,
    Protect,
    ScoreOut,
    State,
    Trigger,
    option,
)
from kvbench.eviction.options import OptionError
from kvbench.eviction.terms import rkv_slot_order
from kvbench.eviction.terms.shares import split_exactly
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("cake")
@dataclass(frozen=True)
class CAKE(Method):
    paper = "Qin et al., arXiv 2503.12491"
    joint = True

    window: int = option(32, "newest queries that vote and always stay", low=2)
    gamma: float = option(200.0, "weight of the variance over the window in the score of a token", low=0)
    tau1: float = option(1.0, "temperature of the dispersion in the preference of a layer", above=0)
    tau2: float = option(1.0, "temperature of the shift in the preference of a layer", above=0)
    kernel: int = option(5, "average-pooling width, 1 for none", low=1, odd=True)
    rounding: Literal["exact", "official"] = option("exact", "how layer budgets become whole numbers")
    decode: bool = option(False, "evict while decoding too, by the newest query")
    compat: Literal["none", "reference"] = option("none", "reproduce the slot order of the released code (decode)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compat == "reference" and not self.decode:
            raise OptionError("compat", "is for decode=true; a prompt's slots are in text order.")

    def needs(self) -> Needs:
        return Needs(queries="window", window=self.window)

    def protect(self, budget: int) -> Protect:
        return Protect(recent=self.window)

    def trigger(self, interval: int) -> Trigger:
        return Every(interval) if self.decode else Once()

    def columns(self) -> tuple[Column, ...]:
        return (rkv_slot_order.RANK,) if self.compat == "reference" else ()

    def states(self) -> tuple[State, ...]:
        return (State(name="entries", shape=("kv_heads",)), State(name="evicted_at")) if self.decode else ()

    def score(self, view: LayerView) -> ScoreOut:
        view = view.last_queries(self.window)  # another method may have asked for more
        among = view.older(self.window)
        # Its own first eviction; before it another method may have evicted the prompt.
        first = view.states["evicted_at"] == 0 if self.decode else torch.ones_like(view.seen, dtype=torch.bool)
        votes = torch.zeros_like(view.positions, dtype=torch.float32)
        stats = {name: torch.zeros_like(view.seen, dtype=torch.float64) for name in ("entropy", "variance")}
        if bool(first.any()):
            votes, stats["entropy"], stats["variance"] = self._window(view, among)
        if not bool(first.all()):
            newest = view.last_queries(1).attend(reduce_g="mean", reduce_q="sum")
            votes = torch.where(first[:, None, None], votes, newest)
        order = rkv_slot_order.slot_order(view) if self.compat == "reference" else view.text_order()
        score = view.pool(votes, "avg", self.kernel, among, order)
        states = self._share(view, first) if self.decode else {}
        stats |= {"first": first, "entries": states.get("entries", view.held())}
        if self.compat == "reference":
            everything = replace(
                view, budget=view.positions.shape[-1] + self.window
            )  # a layer's own budget comes later
            out = rkv_slot_order.keep_in_score_order(everything, score, order, self.window)
            return ScoreOut(out.score, out.columns | states, stats)
        return ScoreOut(score, states, stats)

    def _window(self, view: LayerView, among: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scores of tokens before pooling [b, Hk, N], and the layer's H and V, each [b]."""
        heads = view.keys.shape[1]
        group = view.queries.shape[1] // heads
        scores = []
        entropy = variance = torch.zeros_like(view.seen, dtype=torch.float64)
        for head in range(heads):  # one at a time, for all rows of a long prompt are large
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
            # Sums in float64: the order of the entries must not show in the budgets.
            entropy = entropy - (rows * (rows + 1e-10).log()).sum(dim=(1, 2, 3, 4), dtype=torch.float64)
            variance = variance + shift.sum(dim=(1, 2, 3), dtype=torch.float64)
        return torch.cat(scores, dim=1), entropy, variance

    def _share(self, view: LayerView, first: torch.Tensor) -> dict[str, torch.Tensor]:
        """After the first eviction a layer keeps what that one left: all but what came since."""
        known = view.states["entries"]
        left = view.held() - (view.seen - view.states["evicted_at"])[:, None]
        entries = torch.where(known > 0, known, left)
        return {"entries": torch.where(first[:, None], 0.0, entries), "evicted_at": view.seen.float()}

    def quotas(self, allocation: Allocation) -> torch.Tensor:
        stats, held = allocation.stats, allocation.held
        preference = stats["entropy"] ** (1 / self.tau1) * stats["variance"] ** (1 / self.tau2)  # [b, L]
        count = preference.shape[1]
        # Layers that attend to nothing outside the window share evenly.
        total = preference.sum(dim=1, keepdim=True)
        share = torch.where(total > 0, preference / total, 1 / count)
        spare = (allocation.budget - self.window) * count
        room = (held.amin(dim=-1) - self.window).clamp_min(0)
        split = self._official if self.rounding == "official" else self._exact
        each = split(share * spare, spare, room)[:, :, None].expand(held.shape) + self.window
        return torch.where(stats["first"][:, :, None], each, stats["entries"].long())

    @staticmethod
    def _exact(ideal: torch.Tensor, total: int, room: torch.Tensor) -> torch.Tensor:
        return split_exactly(ideal, total, 0, room)

    @staticmethod
    def _official(ideal: torch.Tensor, total: int, room: torch.Tensor) -> torch.Tensor:
        """Down to whole numbers, and down to what a layer has; then even parts, the odd ones to the first layers."""
        each = torch.minimum(ideal.long(), room)
        cut = (ideal.long() - each).sum(dim=1)
        for missing in (cut, None):
            missing = total - each.sum(dim=1) if missing is None else missing
            open_ = each < room
            members = open_.sum(dim=1).clamp_min(1)
            first = open_ & (open_.cumsum(dim=1) <= (missing % members)[:, None])
            each = each + torch.where(open_, (missing // members)[:, None], 0) + first.long()
        return torch.minimum(each, room)
