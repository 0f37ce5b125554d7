"""scope: divides the budget between the prompt and the answer, and evicts each of the two by its own method.

Paper: Wu et al., SCOPE: Optimizing Key-Value Cache Compression in Long-context Generation, arXiv 2412.13649.

With budget C, another method, `base`, evicts the prompt once, to int(share C) entries, which then stay. Of the answer,
the newest `recent` tokens stay, and the entries to which the newest query attends most. This attention is a softmax
over all entries, and a mean over the query heads of a KV head. `form` says how many entries the answer may have after
t generated tokens, and when the answer is evicted:

    slide          C minus the prompt's entries, at every tick
    adaptive       recent + t / delta, at most C minus the prompt's entries, at every tick
    discontinuous  as many as `adaptive`, every `delta` tokens, whatever the interval

A prompt that leaves room for `recent` + 1 tokens stays whole; the answer then has the rest of the budget in all forms.
Tokens of the prompt that are read after its eviction (`--compress query-agnostic`) count as prompt. If these tokens and
the evicted prompt do not fit beside the newest tokens, the least attended entries of the prompt are evicted at the next
tick.

A protection that replaces the method's own (`--protect`) applies to prompt and answer, each at its own budget. If this
protection keeps more newest tokens than `recent`, its number replaces `recent`.

Defaults: share 0.8, as in the paper's 2,048 + 512 entries, and delta 15; the paper's `recent` is 256 of 512, here 16.

Traps of the released code:

- Its prompt part is the first 2,048 entries, so after a shorter prompt the first generated tokens always stay (here the
  answer gets the room).
- It scores query heads separately, each with its own copy of the entries.
- All sequences of a process share one step counter, which is not reset between them.
- There is one variant for each method that evicts the prompt, and one that does not evict it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from kvbench.errors import quote
from kvbench.eviction.api import Every, Method, Needs, Once, Protect, ScoreOut, Trigger, option
from kvbench.eviction.choose import from_label
from kvbench.eviction.combined import Combined
from kvbench.eviction.delegate import delegate, named, wrapped
from kvbench.eviction.options import OptionError
from kvbench.eviction.protection import parse_protection
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods

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


delegate(PromptPart, "keeps_always", "selector", "settled", "joint")


@dataclass(frozen=True)
class AnswerPart(Method):
    """The part of `scope` that evicts the answer.

    It keeps the newest `recent` tokens and the answer's entries to which the newest query attends most. If evicting the
    answer's other entries is not enough, entries of the prompt are evicted too, the least attended first.

    The answer may have as many entries as the prompt leaves free in the budget. If the prompt was evicted and `form` is
    not slide, a second limit holds too: `recent` entries plus one per `delta` generated tokens. share: the prompt's
    share of the budget, see `PromptPart`.
    """

    share: float
    recent: int
    delta: int
    form: str

    def score(self, view: LayerView) -> torch.Tensor:
        prompt = view.positions < view.prompt_len[:, None, None]
        paid = view.last_queries(1).attend()
        return torch.where(prompt, paid + 2, paid)  # attention is at most 1

    def needs(self) -> Needs:
        return Needs(queries="last", keys=False)

    def protect(self, budget: int) -> Protect:
        return Protect(recent=self.recent)

    def trigger(self, interval: int) -> Trigger:
        return Every(self.delta if self.form == "discontinuous" else interval)

    def allowed(self, budget: int | None, prompt_len: int, seen: int, evictions: int) -> int:
        assert budget is not None, "the method takes a budget"
        if self.form == "slide" or _fits(prompt_len, self.recent, budget):
            return budget
        return min(budget, int(self.share * budget) + self.recent + (seen - prompt_len) // self.delta)

    def min_budget(self) -> int:
        least = math.ceil((self.recent + 1) / (1 - self.share) - ROUNDING)
        return least + (least - int(self.share * least) <= self.recent)


@methods.register("scope")
@dataclass(frozen=True)
class Scope(Method):
    paper = "Wu et al., arXiv 2412.13649"
    version = "3"  # 2: its option `protection` holds, and the least attended entries of the prompt go first;
    # 3: with base=laq, the draft reads as many entries of the prompt as its share allows

    base: str = option("snapkv", "the method that evicts the prompt, with its options in brackets")
    form: Literal["slide", "adaptive", "discontinuous"] = option(
        "adaptive",
        "how many entries of the answer stay, and when the others are evicted. slide: a fixed number, at every tick; "
        "adaptive: a number that grows with the answer, at every tick; discontinuous: as many as adaptive, every "
        "`delta` tokens",
    )
    share: float = option(0.8, "share of the budget that the prompt may fill", low=0.1, high=0.9)
    recent: int = option(16, "newest tokens of the answer that always stay", low=1)
    delta: int = option(15, "generated tokens after which the answer may have one entry more", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        base = named("base", self.base, lambda: from_label(self.base))
        if not (isinstance(base.trigger(1), Once) and base.takes_budget and base.uniform):
            raise OptionError(
                "base",
                "must name a method that evicts the prompt only, to a budget that is equal in all layers and heads; "
                f"got {quote(self.base)}.",
            )

    @cached_property
    def inner(self) -> Combined:
        """The combination of two methods: `PromptPart` evicts the prompt, `AnswerPart` the answer."""
        replaced = parse_protection(self.protection)
        recent = self.recent if replaced is None else max(self.recent, replaced.recent)
        base = wrapped(self.base, self.protection)
        answer = AnswerPart(self.share, recent, self.delta, self.form, protection=self.protection)
        return Combined(("base", "answer"), PromptPart(base, self.share, recent), answer)

    def score(self, view: LayerView) -> torch.Tensor:
        return self.inner.score(view)


delegate(Scope, "during", "uniform", "layerwise")
