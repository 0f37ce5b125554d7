"""foresightkv: a trained network predicts how little each entry will matter; evicted entries are drawn from the worst.

Paper: ForesightKV, arXiv 2602.03203.

Each layer and KV head has a network of 16 hidden units. From an entry's key, value and received attention the network
computes phi, large for entries to be dropped (Eq. 6). `features=paper6` is the paper's list of attention features;
`features=released8` is the longer list of the released code, which the published checkpoints need; `features=attn`
leaves out key and value (the ablation in the paper's Table 5).

The newest entries always stay: those of the L tokens since the last eviction, but at most a quarter of the budget.
`recent` sets another number. In the paper L is 256, in its evaluation code 128, at a budget of 1024 or more; there L
never exceeds the quarter.

To drop n of the other entries, the 2 n with the largest phi become candidates (`pool=2`). Of these, n are drawn
without replacement with probabilities softmax(phi). In the paper this is better than to drop the n largest
(`sampling=false`) or to draw from all entries. The draw is a hash of sample, eviction, layer, head and position.

The released evaluation overwrites the decayed sum of attention with the plain sum; `compat=reference` reproduces this.
The released code has a layer norm that it never applies, and fails if fewer than 2 n entries compete; here all
competing entries are then candidates. `kvbench train foresightkv` and `foresightkv-grpo`, its second stage, train
scorers; `kvbench weights import` imports published ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from kvbench.eviction.api import Column, Method, Needs, Protect, State, option
from kvbench.eviction.columns import QueryHeadColumn, stacked, unstacked
from kvbench.eviction.learned import LearnedWeights, Sizes, misfit
from kvbench.eviction.select import competing, lowest, order_key
from kvbench.eviction.terms import foresight
from kvbench.eviction.terms.foresight import DECAY, WINDOWS, attention_statistics, drop_scores, scorer_shapes
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("foresightkv", aliases=("foresight",))
@dataclass(frozen=True)
class ForesightKV(Method):
    paper = "ForesightKV, arXiv 2602.03203"
    kind = "weights"
    trained = True
    stacked = True

    scorer: str = option("auto", "file with the trained scorer; auto: foresightkv.safetensors beside the model")
    features: Literal["paper6", "released8", "attn"] = option(
        "paper6",
        "what the scorer reads. paper6: key, value and 6 features of attention; released8: key, value and 8 features "
        "of attention; attn: the 6 features of attention alone",
    )
    recent: int | None = option(
        None, "newest tokens that always stay; none: the smaller of interval and a quarter of the budget", low=1
    )
    pool: float = option(
        2.0, "candidates among which the dropped entries are drawn, as a multiple of the number to drop", low=1
    )
    sampling: bool = option(
        True,
        "draw the evicted entries at random among the candidates; false: drop those with the largest phi, the scorer's "
        "output",
    )
    compat: Literal["none", "reference"] = option(
        "none", "reproduce the released evaluation: the decayed sum of attention is overwritten by the plain sum"
    )

    def weights(self) -> LearnedWeights:
        where = {"kind": "foresightkv", "path": self.scorer, "recipe": "foresightkv", "option": "scorer"}
        return LearnedWeights(**where, what="scorer", shapes=partial(scorer_shapes, self.features), check=self._check)

    def needs(self) -> Needs:
        released = self.features == "released8"
        newest, vectors = () if released else WINDOWS, self.features != "attn"
        return Needs(queries="since_last", newest=newest, sums=not released, keys=vectors, values=vectors)

    def columns(self) -> tuple[Column, ...]:
        names = ("sum", "cumulative", "decayed") + (("max", "min") if self.features == "released8" else ())
        return tuple(QueryHeadColumn(name=name) for name in names)

    def states(self) -> tuple[State, ...]:
        return (State(name="chunk"),)  # 1 + number of evictions before the newest chunk; 0 before the first chunk

    def protect(self, budget: int) -> Protect:
        if self.recent is not None:
            return Protect(recent=self.recent)
        return Protect(recent=max(1, budget // 4), by_interval=True)

    def observe(self, view: LayerView) -> dict[str, torch.Tensor]:
        """Add the attention of a block of queries to the statistics of its chunk (the prompt, or the tokens between two
        ticks).

        An eviction within the prompt also begins a new chunk. When a chunk begins, the decayed sum is multiplied by
        0.9 if there was an eviction, and the former chunk's sum is added to it.
        """
        group = view.queries.shape[1] // view.keys.shape[1]
        old = {column.name: stacked(view.columns, column.name, group) for column in self.columns()}
        new = attention_statistics(view, self.features)
        chunk = view.eviction_index.float() + 1
        evicted = (view.states["chunk"] != chunk)[:, None, None, None]  # an eviction since the last block
        goes_on = ~evicted & (view.seen <= view.prompt_len)[:, None, None, None]  # a prompt is read in blocks
        decayed = torch.where(evicted, DECAY, 1.0) * old["decayed"] + old["sum"]
        values = {
            "sum": torch.where(goes_on, old["sum"], 0.0) + new["sum"],
            "cumulative": old["cumulative"] + new["sum"],
            "decayed": torch.where(goes_on, old["decayed"], decayed),
        }
        if self.features == "released8":
            values["max"] = torch.where(goes_on, torch.maximum(old["max"], new["max"]), new["max"])
            values["min"] = torch.where(goes_on, torch.minimum(old["min"], new["min"]), new["min"])
        stored = {"chunk": chunk}
        for name, value in values.items():
            stored |= unstacked(name, value)
        return stored

    def score(self, view: LayerView) -> torch.Tensor:
        phi = drop_scores(view.weights, view.layer_index, *self.input_parts(view))
        if not self.sampling:
            return -phi
        competing = self.competing(view)
        key = order_key(torch.where(competing, -phi, 0.0), view.positions)
        key = key.masked_fill(~competing, torch.iinfo(torch.int64).max)
        candidate = competing & lowest(key, (self.pool * (view.held() - view.budget)).long())
        # The n largest of phi + Gumbel noise are n draws without replacement from softmax(phi).
        noise = view.noise().clamp(1e-20, 1 - 2**-24)
        return torch.where(candidate, (-noise.log()).log() - phi, float("inf"))

    def competing(self, view: LayerView) -> torch.Tensor:
        """Return a mask [b, Hk, N] of the entries that may be evicted: all except the protected ones."""
        return competing(self, view)

    def inputs(self, view: LayerView) -> torch.Tensor:
        """Return the inputs of the trained network for every entry at an eviction, [b, Hk, N, D]."""
        return torch.cat(self.input_parts(view), dim=-1)

    def input_parts(self, view: LayerView) -> list[torch.Tensor]:
        """Return `inputs` in parts, see `foresight.scorer_inputs`."""
        group = view.queries.shape[1] // view.keys.shape[1]
        chunk = {column.name: stacked(view.columns, column.name, group) for column in self.columns()}
        cumulative, decayed = chunk["cumulative"], DECAY * chunk["decayed"] + chunk["sum"]
        if self.compat == "reference":
            decayed = cumulative
        return foresight.scorer_inputs(view, self.features, chunk, cumulative, decayed)

    def _check(self, tensors: Mapping[str, torch.Tensor], model: Sizes) -> str:
        if not ("w1" in tensors and tensors["w1"].dim() == 4):
            return "their tensors are no scorer"
        inputs, hidden = tensors["w1"].shape[2:]
        for other in get_args(foresight.Features):
            shapes = scorer_shapes(other, model, hidden)
            if other != self.features and shapes["w1"][2] == inputs:
                return f"they read features={other}, the method has features={self.features}"
        return misfit(tensors, scorer_shapes(self.features, model, hidden))
