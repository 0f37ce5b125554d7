"""streaming-llm: keep the first tokens (attention sinks) and the newest ones.

Paper: Xiao et al., Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453.

Score: the position. The first `sinks` tokens are protected; the newest tokens fill the rest of the budget.
Default: 4 sinks.

The released code evicts at every step and rotates keys by their place in the cache; kvbench keeps original positions.
Other repositories differ: G-KV keeps budget + 4 entries; in KVCache-Factory all entries but a small window are sinks.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.eviction.api import Method, Needs, Protect, option
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch
from kvbench.registry import methods


@methods.register("streaming-llm", aliases=("streamingllm", "streaming"))
@dataclass(frozen=True)
class StreamingLLM(Method):
    paper = "Xiao et al., arXiv 2309.17453"
    kind = "position"
    stacked = True
    aligned = True

    sinks: int = option(4, "first tokens that always stay", low=0)

    def needs(self) -> Needs:
        return Needs(keys=False)

    def protect(self, budget: int) -> Protect:
        return Protect(sinks=self.sinks)

    def score(self, view: LayerView) -> torch.Tensor:
        return view.positions.float()
