"""kvzip: keep the entries that the model attends to when it repeats its context, independent of the question.

Paper: Kim et al., KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction, arXiv 2505.23416.

After prefill, the prompt is divided into chunks. A probe per chunk runs against the full cache. The probe consists of
an instruction, the tokens that open the reply in the run's prompts, and the chunk itself. For the first chunk the
instruction is "Repeat the previous context exactly.". For later chunks it is "Repeat the part of the previous context
exactly, starting with " and the last `postfix` tokens of the previous chunk. Score:

    zip_j = max over query heads of the group and over the probe's queries of
            softmax over [sinks, this chunk, the probe's own keys up to the query]

for the keys j of that chunk only. Defaults: chunk 2000, postfix 8, one competition over all layers and heads, 4 sinks
that always stay (as in kvpress). If the `sinks` of another protection (`--protect`) are fewer, the first chunk begins
behind them, and the further sinks are scored.

The released code evicts before the question is read (here `--compress query-agnostic`; otherwise entries of the
question compete too) and always keeps the system prompt. With a budget of n entries, the released code keeps only
entries that score strictly above the n-th best: n - 1 entries, or fewer with ties.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Literal

from kvbench.eviction.api import Column, Method, Needs, Once, Probe, Prompt, Protect, Trigger, option
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods

FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with "


@methods.register("kvzip")
@dataclass(frozen=True)
class KVzip(Method):
    paper = "Kim et al., arXiv 2505.23416"
    # 2: first tokens that another protection does not keep are scored; 3: the tokens that open the assistant's turn are
    # those of the run's prompts
    version = "3"
    kind = "probes"

    chunk: int = option(2000, "prompt tokens that one probe repeats", low=1)
    postfix: int = option(8, "how many of the previous chunk's last tokens a probe's instruction quotes", low=0)
    level: Literal["pair", "head"] = option(
        "pair", "pair: all entries of the model compete for one budget; head: each head has its own budget"
    )
    sinks: int = option(4, "first tokens, which always stay and are in the softmax of every chunk", low=0)

    @property
    def scope(self) -> Literal["head", "layer", "model"]:  # type: ignore[override]  # an option decides
        return "model" if self.level == "pair" else "head"

    def needs(self) -> Needs:
        return Needs(probes=True, prompt=True)

    def columns(self) -> tuple[Column, ...]:
        return (Column(name="zip"),)

    def protect(self, budget: int) -> Protect:
        return Protect(sinks=self.sinks)

    def trigger(self, interval: int) -> Trigger:
        return Once()

    def probes(self, prompt: Prompt) -> Generator[Probe, int, None]:
        total = len(prompt.ids)
        first = self.sinks if self.replaced is None else min(self.sinks, self.replaced.sinks)
        for start in range(first, total, self.chunk):
            end = min(start + self.chunk, total)
            if start == first:
                question = prompt.encode(FIRST)
            else:
                question = prompt.encode(LATER) + prompt.ids[max(start - self.postfix, first) : start]
            yield Probe(tokens=(*question, *prompt.reply_header, *prompt.ids[start:end]), span=(start, end))

    def observe(self, view: LayerView) -> dict[str, torch.Tensor]:
        assert view.probe is not None
        start, end = view.probe.span
        inside = view.valid & (view.positions >= start) & (view.positions < end)
        # The softmax runs over the sinks and this chunk only, so other keys are left out of the product.
        among = inside | (view.valid & (view.positions < self.sinks))
        count = min(self.sinks + self.chunk, int(among.sum(dim=-1).max()))  # a bound for plans, which read nothing
        rows = (~among).to(torch.uint8).argsort(dim=-1, stable=True)[..., :count]
        part = replace(
            view,
            keys=view.keys.gather(2, rows[..., None].expand(-1, -1, -1, view.keys.shape[-1])),
            values=None,
            positions=view.positions.gather(-1, rows),
            valid=among.gather(-1, rows),
            whole=False,
        )
        most = torch.zeros_like(view.columns["zip"]).scatter_(-1, rows, part.attend(reduce_g="max", reduce_q="max"))
        best = view.columns["zip"]
        return {"zip": torch.where(inside, torch.maximum(best, most), best)}

    def score(self, view: LayerView) -> torch.Tensor:
        return view.columns["zip"]
