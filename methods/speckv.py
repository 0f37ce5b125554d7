"""speckv: a small draft model drafts the answer, and the model's queries on the draft vote for the prompt's entries.

Paper: Galim et al., Draft-based Approximate Inference for LLMs, arXiv 2506.08373 (SpecKV).

The draft model, which shares the tokenizer, greedily continues the prompt by up to `n` tokens. The model reads this
draft after the prompt; the queries of the draft and of the last `window` prompt tokens score the prompt:

    score_j = maxpool( max over these queries and the group's query heads of softmax over all keys up to the query )

The last `window` prompt tokens stay; the draft is dropped. Defaults: n 64, window 32, kernel 7, reduce max.
`reduce=mean` computes the sum, which gives the same ranking as the mean. The released code drafts as many tokens as the
answer may have. The code's sparse prefill is not eviction and is left out.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal

from kvbench.errors import UserError
from kvbench.eviction.api import Column, Method, Needs, Once, Probe, Prompt, Protect, Trigger, option
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("speckv")
@dataclass(frozen=True)
class SpecKV(Method):
    paper = "Galim et al., arXiv 2506.08373"
    version = "2"  # 2: the draft model's own generation settings do not apply
    kind = "probes"

    draft: str | None = option(None, "folder or hub name of the draft model; it must share the tokenizer (required)")
    n: int = option(64, "tokens that the draft model writes", low=1)
    window: int = option(32, "last tokens of the prompt: their queries vote too, and they always stay", low=1)
    reduce: Literal["max", "mean"] = option("max", "how votes of queries and of query heads are merged")
    kernel: int = option(7, "max-pooling width, 1 for none", low=1, odd=True)

    def needs(self) -> Needs:
        return Needs(queries="window", window=self.window, probes=True, prompt=True)

    def columns(self) -> tuple[Column, ...]:
        return (Column(name="draft"),)

    def protect(self, budget: int) -> Protect:
        return Protect(recent=self.window)

    def summed(self, view: LayerView) -> int:
        return 1 if self.reduce == "max" else self.n + self.window  # a draft that ends early has fewer queries

    def trigger(self, interval: int) -> Trigger:
        return Once()

    def drafts(self) -> tuple[str, ...]:
        if not self.draft:
            raise UserError(
                "method 'speckv' needs a draft model of the same tokenizer: --method-opt speckv.draft=FOLDER_OR_NAME."
            )
        return (self.draft,)

    def probes(self, prompt: Prompt) -> Generator[Probe, int, None]:
        [draft] = self.drafts()
        tokens = prompt.draft(draft, self.n)
        if tokens:  # the draft may be empty
            yield Probe(tokens=tokens)

    def observe(self, view: LayerView) -> dict[str, torch.Tensor]:
        return {"draft": self._merge(view.columns["draft"], self._votes(view))}

    def score(self, view: LayerView) -> torch.Tensor:
        votes = self._merge(view.columns["draft"], self._votes(view.last_queries(self.window)))
        return view.pool(votes, "max", self.kernel, view.older(self.window))

    def _votes(self, view: LayerView) -> torch.Tensor:
        if self.reduce == "max":
            return view.attend(reduce_g="max", reduce_q="max")
        return view.attend(reduce_g="mean", reduce_q="sum")

    def _merge(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.maximum(a, b) if self.reduce == "max" else a + b
