"""The two methods that `scope` combines (SCOPE, arXiv 2412.13649): one evicts the prompt, the other the answer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvbench.eviction.api import Every, Method, Needs, Protect, ScoreOut, Trigger
from kvbench.eviction.delegate import DECLARATIONS, PROPERTIES, delegate
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch

ROUNDING = 1e-9  # largest error of a quotient that should be a whole number


def _fits(prompt_len: int, recent: int, budget: int) -> bool:
    """Return whether the budget has room for the whole prompt and `recent` + 1 tokens of the answer."""
    return prompt_len + recent < budget


@dataclass(frozen=True)
class PromptPart(Method):
    """The part of `scope` that evicts the prompt: method `inner` keeps int(share x budget) entries per head on average.

    A prompt stays whole if the budget has room for it and for `recent` + 1 tokens of the answer.
    """

    inner: Method
    share: float
    recent: int

    def score(self, view: LayerView) -> torch.Tensor | ScoreOut:
        return self.inner.score(view)

    def allowed(self, budget: int | None, prompt_len: int, seen: int, evictions: int) -> int:
        assert budget is not None, "a base takes a budget"
        return budget if _fits(prompt_len, self.recent, budget) else int(self.share * budget)

    def min_budget(self) -> int:
        least = math.ceil(self.inner.min_budget() / self.share - ROUNDING)
        return least + (int(self.share * least) < self.inner.min_budget())


_OWN = ("allowed", "min_budget")
_MORE = ("keeps_always", "selector", "settled")
delegate(PromptPart, tuple(n for n in (*DECLARATIONS, *_MORE) if n not in _OWN), (*PROPERTIES, "joint"))


@dataclass(frozen=True)
class AnswerPart(Method):
    """The part of `scope` that evicts the answer.

    It keeps the newest `recent` tokens and the answer's entries to which the newest query attends most. If evicting the
    answer's other entries is not enough, entries of the prompt are evicted too, the least attended first.

    The answer may have as many entries as the prompt leaves free in the budget. If `grows` is true and the prompt was
    evicted, a second limit holds too: `recent` entries plus one per `delta` generated tokens. share: the prompt's
    share of the budget, see `PromptPart`. every: generated tokens between evictions; None: the run's interval.
    """

    share: float
    recent: int
    delta: int
    grows: bool
    every: int | None

    def score(self, view: LayerView) -> torch.Tensor:
        prompt = view.positions < view.prompt_len[:, None, None]
        paid = view.last_queries(1).attend()
        return torch.where(prompt, paid + 2, paid)  # attention is at most 1

    def needs(self) -> Needs:
        return Needs(queries="last", keys=False)

    def protect(self, budget: int) -> Protect:
        return Protect(recent=self.recent)

    def trigger(self, interval: int) -> Trigger:
        return Every(self.every or interval)

    def allowed(self, budget: int | None, prompt_len: int, seen: int, evictions: int) -> int:
        assert budget is not None, "the method takes a budget"
        if not self.grows or _fits(prompt_len, self.recent, budget):
            return budget
        return min(budget, int(self.share * budget) + self.recent + (seen - prompt_len) // self.delta)

    def min_budget(self) -> int:
        least = math.ceil((self.recent + 1) / (1 - self.share) - ROUNDING)
        return least + (least - int(self.share * least) <= self.recent)
