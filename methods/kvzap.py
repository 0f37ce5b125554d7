"""kvzap: a small network predicts, from a token's hidden state, the scores that kvzip would give its entries.

Paper: Jegou and Jeblick, KVzap: Fast, Adaptive, and Faithful KV Cache Pruning, arXiv 2601.07891 (NVIDIA/kvpress).

Each layer has such a network, its surrogate (`kvbench.eviction.terms.surrogate`). When a token is read, the surrogate
reads the input of the layer's attention. For every KV head it predicts the logarithm of the entry's worth. No attention
is computed, and the prediction never changes. The newest `recent` tokens always stay.

    strategy=fixed_budget   the best entries of the whole model, of each layer or of each head (`level`) stay
    strategy=threshold      no budget: at every tick, entries with a score below `threshold` are evicted, except those
                            of the newest `recent` tokens

Defaults: threshold -4 and recent 128 as in the released example. `kvbench train kvzap` trains surrogates for a model
with the scores of `kvzip` as targets; `kvbench weights import` imports published ones (nvidia/KVzap-...).

Traps of kvpress: while decoding it evicts only with `decoding=True`; it masks entries and frees no memory; its top-k
form protects no window (`recent=0 level=head`); none of its forms protects sinks. With a threshold, every head keeps at
least one entry here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvbench.eviction.api import Column, Needs, Protect, option
from kvbench.eviction.columns import GivenColumn
from kvbench.eviction.learned import LearnedWeights
from kvbench.eviction.new_tokens import NewTokens
from kvbench.eviction.terms.surrogate import log_worth, surrogate_misfit, surrogate_shapes
from kvbench.eviction.terms.threshold import Thresholded
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("kvzap")
@dataclass(frozen=True)
class KVzap(Thresholded):
    paper = "Jegou and Jeblick, arXiv 2601.07891"
    kind = "weights"
    trained = True
    stacked = True

    surrogate: str = option("auto", "file with the trained networks; auto: kvzap.safetensors beside the model")
    level: Literal["model", "layer", "head"] = option(
        "model",
        "which entries compete with each other. model: those of the whole model; layer: those of all heads of a layer; "
        "head: those of one head",
    )
    threshold: float = option(
        -4.0,
        "least score of an entry that stays (strategy=threshold); the score is the logarithm of the predicted worth",
    )
    recent: int = option(128, "newest tokens that always stay", low=0)

    @property
    def scope(self) -> Literal["head", "layer", "model"]:  # type: ignore[override]  # an option decides
        return self.level if self.takes_budget else "layer"

    @property
    def least(self) -> float:
        return self.threshold

    def needs(self) -> Needs:
        return Needs(keys=False)

    def weights(self) -> LearnedWeights:
        where = {"kind": "kvzap", "path": self.surrogate, "recipe": "kvzap", "option": "surrogate"}
        return LearnedWeights(**where, what="surrogate", shapes=surrogate_shapes, check=surrogate_misfit)

    def columns(self) -> tuple[Column, ...]:
        return (GivenColumn(name="zap"),)

    def on_tokens(self, new: NewTokens) -> dict[str, torch.Tensor]:
        return {"zap": log_worth(new)}

    def protect(self, budget: int) -> Protect:
        return Protect(recent=self.recent)

    def score(self, view: LayerView) -> torch.Tensor:
        return view.columns["zap"]
