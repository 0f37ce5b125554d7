"""text-first: keep entries by the scores of another method, `base`, but evict entries of images before entries of text.

The entries that `base` protects stay. No other entry of text is evicted while its head has an unprotected entry of an
image. Among entries of text, and among entries of images, the scores of `base` decide. So without images `base` decides
alone. The engine keeps a column with the number of each entry's image.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvbench.errors import quote
from kvbench.eviction.api import Column, Protect, ScoreOut, option
from kvbench.eviction.delegate import Wrapper, delegate, named
from kvbench.eviction.modality import MODALITY
from kvbench.eviction.options import OptionError
from kvbench.eviction.terms.rkv_slot_order import RANK
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("text-first")
@dataclass(frozen=True)
class TextFirst(Wrapper):
    version = "3"  # 3: shares of a `base` such as pyramidkv fill the budget on prompts in chunks

    base: str = option("gkv", "the method that scores, with its options in brackets")

    def __post_init__(self) -> None:
        super().__post_init__()
        inner = named("base", self.base, lambda: self.inner)
        if not inner.takes_budget or MODALITY in inner.columns():
            raise OptionError(
                "base", f"must name a method that takes a budget, other than text-first; got {quote(self.base)}."
            )
        if RANK in inner.columns():  # such a method scores only the entries that it keeps
            raise OptionError("base", f"must name a method that scores every entry; got {quote(self.base)}.")

    def score(self, view: LayerView) -> torch.Tensor | ScoreOut:
        return self.inner.score(view)

    def columns(self) -> tuple[Column, ...]:
        return (*self.inner.columns(), MODALITY)

    def keeps_always(self, budget: int) -> Protect:
        return replace(super().keeps_always(budget), text=True)


delegate(TextFirst, "quotas", "selector", "settled", "scope", "joint", "uniform", "summed")
