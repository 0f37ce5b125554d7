"""snapkv: the last queries of the prompt vote for prompt entries, once, right after the prompt was read.

Paper: Li et al., SnapKV: LLM Knows What You Are Looking For Before Generation, arXiv 2404.14469.

Score: pool(reduce over the group of sum_i softmax_j(q_i k_j / sqrt(d))), where i runs over the last `window` queries
and the softmax over all keys, window included. The window always stays. Pooling runs along the text over the older
entries. Generated entries are never evicted.

Defaults: window 32, kernel 7, max pooling, mean over the group before pooling (with max pooling the order matters).
Published settings differ:

- The released code uses average pooling with kernel 5.
- The runner of KVCache-Factory uses window 8 and kernel 7.
- kvpress uses window 64 and average pooling with kernel 5.

The released code gives each of the g query heads of a KV head its own cache, which takes g times the memory; with
`heads=query` the query heads of a group split their KV head's budget instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.eviction.terms.prompt_vote import PromptVote
from kvbench.registry import methods


@methods.register("snapkv")
@dataclass(frozen=True)
class SnapKV(PromptVote):
    paper = "Li et al., arXiv 2404.14469"
