"""random: keep the newest tokens and a random choice of the others; the baseline that every other method must beat.

The score is a hash of sample, eviction, layer, head and position, so results do not depend on the batch.
Default: the newest 16 stay. Without them a model loses its current sentence, and the baseline would measure that loss.

`prompt` protects the prompt too, as in Random Attention (arXiv 2609.03430). There the R newest tokens stay, and R is
also the eviction interval; here R is `recent`. Let C be the budget, and P the smaller of the prompt's length and
C - recent - 1. At most the first P tokens of the prompt are protected:

    prompt=all   all P tokens stay (the paper's `random_pp`)
    prompt=cap   of the P tokens, the first `cap` (an option) stay, and every second one after them (`random_pcap`)

All other tokens are drawn anew at every eviction. Trap: if the prompt is longer than C - recent - 1, prompt=all leaves
room for one drawn token only, as in the released code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvbench.eviction.api import Method, Needs, Protect, option
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("random")
@dataclass(frozen=True)
class Random(Method):
    kind = "noise"
    stacked = True

    recent: int = option(16, "newest tokens that always stay", low=0)
    prompt: Literal["none", "all", "cap"] = option(
        "none",
        "which prompt tokens always stay, as far as the budget has room. none: no token; all: every token; cap: the "
        "first `cap` tokens, and every second token after them",
    )
    cap: int = option(512, "prompt=cap: this many first tokens of the prompt stay, after them every second one", low=0)

    def needs(self) -> Needs:
        return Needs(keys=False)

    def protect(self, budget: int) -> Protect:
        return Protect(recent=self.recent)

    def score(self, view: LayerView) -> torch.Tensor:
        noise = view.noise()
        if self.prompt == "none" or self.replaced is not None:
            return noise
        kept = view.prompt_len.clamp(max=view.budget - self.recent - 1)[:, None, None]
        stays = view.positions < kept
        if self.prompt == "cap":
            beyond = view.positions - self.cap
            stays &= (beyond < 0) | (beyond % 2 == 0)
        return noise.masked_fill(stays, float("inf"))
