"""pyramidinfer: each layer keeps a part of the tokens that the layer below keeps; the newest queries choose them.

Paper: Yang et al., PyramidInfer: Pyramid KV Cache Compression for High-throughput LLM Inference, arXiv 2405.12532.

Score of a token: softmax attention of the newest `window` queries over all entries; a mean over these queries, with
weights that rise evenly from 1 to `rise`, and over all query heads. All heads of a layer keep the same tokens: the
first `sinks`, the newest `window`, and the best of those that the layer below keeps. L layers evict, from layer 0. Of
the tokens before the window that layer l keeps, layer l + 1 keeps the share

    r_l = decay + (1 - decay) (1 + cos(pi l / L)) / 2

So the layers keep the window and, before it, numbers of tokens in the proportion 1, r_0, r_0 r_1, ... The mean of all
entries is the budget, and largest remainders make whole numbers. No layer keeps more tokens than the prompt has.

Defaults: decay 0.9, rise 1.2 and 4 sinks as in the released configuration for Llama 2. There the newest fifth of the
prompt's queries vote, here the newest 32.

Traps: the released code has no budget, only the shares r_l. It applies them while the prompt is read, so upper layers
never see a token that a lower layer drops; here they see the whole prompt. Its schedule `linear` is overwritten by the
constant `decay`. It evicts nothing from prompts below 64 tokens. Of every 16 generated tokens it drops only a share, so
the cache grows; here all generated tokens stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from kvbench.eviction.api import Allocation, Method, Needs, Once, Protect, ScoreOut, Trigger, option
from kvbench.eviction.select import allocation_of, keep_mask, kept_always, protected
from kvbench.eviction.terms.shares import split_exactly
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("pyramidinfer")
@dataclass(frozen=True)
class PyramidInfer(Method):
    paper = "Yang et al., arXiv 2405.12532"
    version = "2"  # 2: the shares apply to the tokens before the window only
    aligned = True
    joint = True

    window: int = option(32, "newest prompt tokens: their queries vote, and they always stay", low=1)
    sinks: int = option(4, "first tokens that always stay", low=0)
    decay: float = option(
        0.9,
        "every layer keeps a share of the tokens that the layer below keeps; towards the last layer the share falls "
        "from 1 to this value",
        low=0,
        high=1,
    )
    rise: float = option(1.2, "weight of the newest query; that of the oldest is 1", low=0)

    def needs(self) -> Needs:
        return Needs(queries="window", window=self.window)

    def protect(self, budget: int) -> Protect:
        return Protect(sinks=self.sinks, recent=self.window)

    def trigger(self, interval: int) -> Trigger:
        return Once()

    def score(self, view: LayerView) -> torch.Tensor:
        paid = view.attend(reduce_q=None)  # [b, Hk, w, N]
        weight = torch.linspace(1, self.rise, paid.shape[2], device=paid.device)
        votes = (paid * weight[:, None]).mean(dim=2)
        order = view.text_order()  # heads hold the same tokens, perhaps in another order
        row = votes.gather(-1, order).mean(dim=1, keepdim=True)
        return torch.empty_like(votes).scatter_(-1, order, row.expand_as(votes).contiguous())

    def settled(self, views: Sequence[LayerView], outs: list[ScoreOut]) -> list[ScoreOut]:
        sizes, settled = self.quotas(allocation_of(views, outs)), list[ScoreOut]()
        gone = outs[0].score.new_zeros(len(outs[0].score), views[0].longest + 1)  # 1 for tokens that a layer drops
        for view, out, size in zip(views, outs, sizes.unbind(1)):
            at = view.positions.where(view.valid, views[0].longest)  # invalid entries share the last column of `gone`
            lower = gone.gather(-1, at.flatten(1)).view_as(out.score)
            score = out.score - lower * (1 + self.rise)  # tokens that a lower layer drops rank below those it keeps
            must = protected(kept_always(self, view), view.positions, view.seen, view.prompt_len, view.mask)
            keep = keep_mask(score, view.positions, view.mask, must, size)[:, 0]
            gone = torch.ones_like(gone).scatter_(-1, at[:, 0], (~keep).to(gone.dtype))
            settled.append(ScoreOut(score))
        return settled

    def quotas(self, allocation: Allocation) -> torch.Tensor:
        held, layers = allocation.held, allocation.layer_count
        passed = [self.decay + (1 - self.decay) * (1 + math.cos(math.pi * i / layers)) / 2 for i in range(layers - 1)]
        share = torch.tensor([*accumulate([1.0, *passed], mul)], dtype=torch.float64, device=held.device)
        older = max(0, allocation.budget - self.window)  # as in the released code, the window does not shrink
        ideal = (share / share.sum() * older * layers + self.window).expand(len(held), -1)
        low = held[..., 0].clamp(max=min(self.min_budget(), allocation.budget))
        return split_exactly(ideal, allocation.budget * layers, low, held[..., 0])[..., None].expand_as(held)
