"""locret: trained retaining heads predict the largest attention logit that an answer's query gives a token.

Paper: Huang et al., Locret: Accelerating Long-Context LLM Inference with Retaining Heads, arXiv 2410.01805.

Each layer has a retaining head (`kvbench.eviction.terms.retaining`). When a token is read, the head scores the token's
hidden state for every KV head. No attention is computed, and a score never changes, so scores from different chunks of
a prompt can be compared: the method is made for ``--prefill chunked``. The newest `recent` tokens always stay. Of the
others, those with the highest scores fill the budget. Entries of the prompt are evicted; with `decode`, also those of
generated tokens.

Defaults: recent 100, as in the release. `kvbench train locret` trains heads for a model.

Traps of the released code: while it reads chunks it keeps the newest 2,500 tokens ("stabilizers"), which may exceed the
budget. Its last 100 tokens come on top of the budget; here they are part of it. It learns logits before the softmax;
their level differs between heads, so heads must not share a budget. It fixes the number of outputs per layer at 8.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.eviction.api import Column, Every, Method, Needs, Once, Protect, Trigger, option
from kvbench.eviction.columns import GivenColumn
from kvbench.eviction.learned import LearnedWeights
from kvbench.eviction.new_tokens import NewTokens
from kvbench.eviction.terms.retaining import retained, retaining_misfit, retaining_shapes
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("locret")
@dataclass(frozen=True)
class Locret(Method):
    paper = "Huang et al., arXiv 2410.01805"
    kind = "weights"
    trained = True
    stacked = True

    heads: str = option("auto", "file with the trained retaining heads; auto: locret.safetensors beside the model")
    recent: int = option(100, "newest tokens that always stay", low=0)
    decode: bool = option(False, "evict while decoding too")

    def needs(self) -> Needs:
        return Needs(keys=False)

    def weights(self) -> LearnedWeights:
        where = {"kind": "locret", "path": self.heads, "recipe": "locret", "option": "heads"}
        return LearnedWeights(**where, what="retaining head", shapes=retaining_shapes, check=retaining_misfit)

    def columns(self) -> tuple[Column, ...]:
        return (GivenColumn(name="retained"),)

    def on_tokens(self, new: NewTokens) -> dict[str, torch.Tensor]:
        return {"retained": retained(new)}

    def protect(self, budget: int) -> Protect:
        return Protect(recent=self.recent)

    def trigger(self, interval: int) -> Trigger:
        return Every(interval) if self.decode else Once()

    def score(self, view: LayerView) -> torch.Tensor:
        return view.columns["retained"]
