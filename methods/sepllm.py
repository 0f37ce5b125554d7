"""sepllm: keep the first tokens, the newest ones, and separators such as commas, full stops and line breaks.

Paper: Chen et al., SepLLM: Accelerate Large Language Models by Compressing One Segment into One Separator,
arXiv 2412.12094; its training-free form. No query is read.

The first `sinks` tokens and the newest `recent` always stay. The newest separators fill the rest of the budget. If
they are too few, the newest other tokens fill what is left. A separator is a token with no other characters than
`marks` and white space (`kvbench.engine.model.marks`); a tokenizer without such tokens is refused. All heads keep the
same tokens.

Defaults: 4 sinks and the marks as in the release; 128 newest tokens, where the released example has 256 of 512.

Traps of the released code: it lists ids of tokens for three tokenizers. The lists lack joined tokens, such as a full
stop with a line break, which are separators here. It reserves entries for separators, so with fewer separators the
cache is not full; the sequence with the fewest separators decides for its whole batch. It renumbers positions inside
the cache; here positions stay.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.errors import quote
from kvbench.eviction.api import Column, Method, Needs, Protect, option
from kvbench.eviction.columns import GivenColumn
from kvbench.eviction.new_tokens import NewTokens
from kvbench.eviction.options import OptionError
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods

AHEAD = 1 << 23  # above all positions; float32 holds twice as many whole numbers exactly


@methods.register("sepllm")
@dataclass(frozen=True)
class SepLLM(Method):
    paper = "Chen et al., arXiv 2412.12094"
    kind = "position"
    stacked = True
    aligned = True

    sinks: int = option(4, "first tokens that always stay", low=0)
    recent: int = option(128, "newest tokens that always stay", low=0)
    marks: str = option(
        ".,?!;:",
        "characters of which separators consist, beside white space; a value other than the default must have no comma "
        "or bracket",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.marks.strip():
            raise OptionError("marks", "must have a character that is not white space.")
        if self.marks != type(self).marks and set(self.marks) & set(",()"):  # a label lists options in brackets
            raise OptionError(
                "marks",
                f"must have no bracket and, unless it is the default value, no comma; got {quote(self.marks)}.",
            )

    def needs(self) -> Needs:
        return Needs(keys=False, marks=self.marks)

    def columns(self) -> tuple[Column, ...]:
        return (GivenColumn(name="separator"),)

    def on_tokens(self, new: NewTokens) -> dict[str, torch.Tensor]:
        assert new.marks is not None
        return {"separator": new.marks.float()[:, None].expand(new.keys.shape[:3]).contiguous()}

    def protect(self, budget: int) -> Protect:
        return Protect(sinks=self.sinks, recent=self.recent)

    def score(self, view: LayerView) -> torch.Tensor:
        return view.positions.float() + AHEAD * view.columns["separator"]
