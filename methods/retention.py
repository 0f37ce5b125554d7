"""retention: retention gates as in `trimkv`, with one competition of all entries of all layers and heads.

Paper: Make Each Token Count, arXiv 2605.09649 (global retention with weight-tied gates; DBTrimKV in its repository).

The gate is deeper than trimkv's (`gate=rg10`). Layers, or layers and heads, share its last projection, so that their
betas are comparable: `tie=layers` in the released code, `tie=layers_and_heads` in the paper. An entry's score is

    log G = log of the sum over the next n queries of beta^age,     n = `horizon`; n = 1 is trimkv's score

Of the whole model's entries the L Hk C with the highest scores stay (L layers, Hk KV heads, budget C); with
`level=layer` the heads of each layer compete for Hk C. No head is left empty. With `floor`, every head keeps `floor`
entries more than it has among the model's best L Hk (C - floor) entries, as in the released code.

With `strategy=threshold` there is no budget: at every tick each head keeps its best entry and those with G of at least
`threshold`. The released code has this option too; there a head may end up empty.

Defaults: horizon 1 as in the released code (the paper does not state it), floor 0, and threshold 0.8 as in the code's
benchmark of images. The released code calls the horizon `lookahead_steps`; that benchmark sets it to 2. Ages in the
released code are larger than here, by one for n = 1 and by two for n > 1; the option `age_offset` adds this difference.
`kvbench train retention` trains gates; `kvbench weights import` imports published ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from kvbench.eviction.api import option
from kvbench.eviction.options import OptionError
from kvbench.eviction.select import order_key
from kvbench.eviction.terms.gated import Gated
from kvbench.eviction.terms.gates import GateForm
from kvbench.eviction.terms.threshold import Thresholded
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("retention", aliases=("global-retention", "dbtrimkv"))
@dataclass(frozen=True)
class Retention(Thresholded, Gated):
    paper = "Make Each Token Count, arXiv 2605.09649"
    name = "retention"
    usual = GateForm("rg10", "layers")
    stacked = True

    level: Literal["model", "layer"] = option(
        "model",
        "which entries compete with each other. model: those of the whole model; layer: those of all heads of a layer",
    )
    floor: float = option(0.0, "entries that every head keeps at least; below 1: a share of the budget", low=0)

    threshold: float = option(
        0.8, "least worth of an entry that stays, beside each head's best entry (strategy=threshold)", above=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.floor and not self.takes_budget:
            raise OptionError("floor", f"must be 0 with strategy=threshold; got {self.floor:g}.")

    @property
    def least(self) -> float:
        return math.log(self.threshold)

    @property
    def scope(self) -> Literal["head", "layer", "model"]:  # type: ignore[override]  # an option decides
        return self.level

    def min_budget(self) -> int:
        return max(super().min_budget(), int(self.floor))

    def score(self, view: LayerView) -> torch.Tensor:
        score = super().score(view)
        sure = int(self.floor * view.budget) if self.floor < 1 else int(self.floor)
        if not sure:
            return score
        score = torch.where(view.valid, score, float("-inf"))
        key = order_key(score, view.positions).masked_fill(~view.valid, torch.iinfo(torch.int64).min)
        order = key.argsort(dim=-1, descending=True)
        ranked = score.gather(-1, order)
        certain = torch.full_like(ranked[..., :sure], float("inf"))
        return torch.empty_like(score).scatter_(-1, order, torch.cat([certain, ranked], dim=-1)[..., : score.shape[-1]])
