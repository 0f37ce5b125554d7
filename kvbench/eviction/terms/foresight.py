"""ForesightKV's scorer (arXiv 2602.03203): its features of an entry, and its small network per KV head.

Features are the entry's key (post-RoPE), its value, and statistics of attention for each of the g query heads of its
group. A is the attention that a query of such a head paid to the entry (softmax over all entries):

    paper6       sums of A over the newest 8, 16 and 32 queries and over the chunk; cumulative sum; decayed sum
    released8    max, min and sum of A over the chunk; the same sum three times more; cumulative sum; decayed sum
    attn         as paper6, without key and value: the ablation of the paper's Table 5

"paper6" is the paper's list, "released8" the released code's. The released code is meant to sum over the newest 16, 8
and 32 queries too. By mistake it slices the axis of query heads, so all three sums equal the sum over the chunk. Each
statistic is a block of g numbers, one per query head.

A chunk is the queries since the previous tick, or the whole prompt. The cumulative sum and the decayed sum begin with
an entry's first chunk; the decayed sum is multiplied by 0.9 at every eviction.

    phi = w2 . gelu(x w1 + b1) + b2        one network per layer and KV head; large phi: evict

Tensors: w1 [L, Hk, D, h], b1 [L, Hk, h], w2 [L, Hk, h], b2 [L, Hk], with L layers, Hk KV heads and h hidden units. D
numbers enter the network: d + dv + 6 g (paper6), d + dv + 8 g (released8) or 6 g (attn), with d per key and dv per
value.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

from kvbench.eviction.learned import Shapes, Sizes
from kvbench.eviction.terms.blocks import in_blocks
from kvbench.eviction.terms.window_attention import Reduce
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch

Features = Literal["paper6", "released8", "attn"]
COUNT: dict[Features, int] = {"paper6": 6, "released8": 8, "attn": 6}  # per query head
WINDOWS = (8, 16, 32)
DECAY = 0.9
HIDDEN = 16  # units, in the paper and its code
NARROW = 16  # the scorer joins parts of its input with fewer columns


def scorer_shapes(features: Features, model: Sizes, hidden: int = HIDDEN) -> Shapes:
    """Return the shapes of a scorer's tensors for a model of these sizes."""
    layers, heads = model["num_hidden_layers"], model["num_key_value_heads"]
    content = 0 if features == "attn" else 2 * model["head_dim"]
    inputs = content + COUNT[features] * (model["num_attention_heads"] // heads)
    return {
        "w1": (layers, heads, inputs, hidden),
        "b1": (layers, heads, hidden),
        "w2": (layers, heads, hidden),
        "b2": (layers, heads),
    }


def attention_statistics(view: LayerView, features: Features) -> dict[str, torch.Tensor]:
    """Return statistics of the attention that the view's queries pay to each entry, each [b, Hk, g, N].

    The statistics are over all queries of the view: "sum" and, for "released8", also "max" and "min". A query pays 0 to
    entries newer than itself.
    """
    kinds: tuple[Reduce, ...] = ("sum", "max", "min") if features == "released8" else ("sum",)
    return {kind: view.attend(reduce_g=None, reduce_q=kind) for kind in kinds}


def scorer_inputs(
    view: LayerView,
    features: Features,
    chunk: Mapping[str, torch.Tensor],
    cumulative: torch.Tensor,
    decayed: torch.Tensor,
) -> list[torch.Tensor]:
    """Return the scorer's input in parts, in order: keys, values, and each kind of attention; "attn": attention only.

    Together the parts [b, Hk, N, ...] hold the D numbers of each entry. Joining them for all entries would copy them
    once more, which takes longer than the network. Places without an entry hold 0.

    Args:
        view: of a method that declares Needs(values=True), except for "attn", and Needs(newest=WINDOWS), except for
            "released8".
        chunk: by name ("sum"; for "released8" also "max" and "min"), statistics of the attention in the newest chunk,
            each [b, Hk, g, N].
        cumulative, decayed: [b, Hk, g, N], the cumulative and the decayed sum; both include the newest chunk.
    """
    total = chunk["sum"]
    if features == "released8":
        attention = [chunk["max"], chunk["min"], total, total, total, total]
    else:
        attention = [*view.newest_attention(WINDOWS), total]
    inputs = [x.transpose(-1, -2) for x in (*attention, cumulative, decayed)]
    if features != "attn":
        assert view.values is not None
        inputs = [view.keys.float(), view.values.float(), *inputs]
    return inputs if view.mask is None else [torch.where(view.mask[..., None], x, 0.0) for x in inputs]


def drop_scores(weights: Mapping[str, torch.Tensor], layer: int | torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    """Return the scorer's output phi [b, Hk, N] for inputs [b, Hk, N, D]; large: evict. inputs: one tensor, or the
    parts that `scorer_inputs` returns. layer: see `LayerView.layer_index`."""
    of_layer = [weights[name][layer].float() for name in ("w1", "b1", "w2", "b2")]  # [(b,) Hk, ...]
    _, heads, n, _ = inputs[0].shape

    def phi(some: slice) -> torch.Tensor:
        own = [w[some] for w in of_layer] if of_layer[-1].dim() == 2 else of_layer
        return _network(own, [x[some] for x in inputs])

    return in_blocks(inputs[0], heads * n * of_layer[1].shape[-1], phi)


def _network(weights: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    w1, b1, w2, b2 = weights
    b, heads, n, _ = inputs[0].shape
    wide = [*itertools.takewhile(lambda x: x.shape[-1] >= NARROW, inputs)]
    if len(wide) < len(inputs):  # few columns make a slow product: join them, each column in one piece
        narrow = [x.transpose(-1, -2) for x in inputs[len(wide) :]]
        wide.append(torch.cat(narrow, dim=-2).transpose(-1, -2))
    first, *others = w1.expand(b, *w1.shape[-3:]).flatten(0, 1).split([x.shape[-1] for x in wide], dim=-2)
    h = torch.baddbmm(b1.expand(b, *b1.shape[-2:]).flatten(0, 1)[:, None], wide[0].flatten(0, 1), first)
    for x, w in zip(wide[1:], others):
        h.baddbmm_(x.flatten(0, 1), w)
    # No matrix-vector product: its last bits depend on the number of sequences.
    return (torch.nn.functional.gelu(h.view(b, heads, n, -1)) * w2[..., None, :]).sum(dim=-1) + b2[..., None]
