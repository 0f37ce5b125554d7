"""scope: the prompt and the answer each have a part of the budget and a method that evicts them.

Paper: Wu et al., SCOPE: Optimizing Key-Value Cache Compression in Long-context Generation, arXiv 2412.13649.

With budget C, `base` evicts the prompt once, to int(share C) entries, which stay. Of the answer the newest
`recent` tokens stay, and the entries to which the newest query attends most (softmax over all entries, mean over the
group). `form` says how many there may be after t generated tokens, and when they are evicted:

    slide          C minus the prompt's entries, at every tick
    adaptive       recent + t / delta, at most C minus the prompt's entries, at every tick
    discontinuous  the same number, every `delta` tokens, whatever the interval

A prompt that leaves room for `recent` + 1 tokens stays whole; the answer then has the rest of the budget in all forms.

Defaults: share 0.8, as in the paper's 2,048 + 512 entries, and delta 15; the paper's `recent` is 256 of 512, here 16.

Traps of the released code: its prompt part is its first 2,048 slots, so a shorter prompt makes the first generated
tokens permanent (here the answer gets the room); it scores query heads apart and stores a copy of each entry for each;
its step counter is shared by all sequences of a process and is not reset between them; it has a base for each prompt
method, and one without eviction of the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from kvbench.errors import UserError, quote
from kvbench.eviction.api import Method, Once, option
from kvbench.eviction.choose import from_label
from kvbench.eviction.combined import Combined
from kvbench.eviction.delegate import DECLARATIONS, PROPERTIES, delegate
from kvbench.eviction.options import OptionError
from kvbench.eviction.terms.two_parts import AnswerPart, PromptPart
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("scope")
@dataclass(frozen=True)
class Scope(Method):
    paper = "Wu et al., arXiv 2412.13649"

    base: str = option("snapkv", "the method that evicts the prompt, with its options in brackets")
    form: Literal["slide", "adaptive", "discontinuous"] = option(
        "adaptive",
        "the answer's entries: the same number at every tick, a growing number, or that every `delta` tokens",
    )
    share: float = option(0.8, "share of the budget that the prompt may fill", low=0.1, high=0.9)
    recent: int = option(16, "newest tokens of the answer that always stay", low=1)
    delta: int = option(15, "generated tokens per entry by which the answer's part grows", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            base = from_label(self.base)
        except UserError as error:
            raise OptionError("base", f"is no method: {error}") from None
        if not isinstance(base.trigger(1), Once) or not base.takes_budget:
            raise OptionError("base", f"must name a method that evicts the prompt to a budget; got {quote(self.base)}.")

    @cached_property
    def inner(self) -> Combined:
        """Return the two combined methods: the first decides for the prompt, the second for the answer."""
        jumps, grows = self.form == "discontinuous", self.form != "slide"
        answer = AnswerPart(self.share, self.recent, self.delta, grows, self.delta if jumps else None)
        return Combined(("base", "answer"), PromptPart(from_label(self.base), self.share, self.recent), answer)

    def score(self, view: LayerView) -> torch.Tensor:
        return self.inner.score(view)


delegate(Scope, (*DECLARATIONS, "during"), (*PROPERTIES, "uniform", "layerwise"))
