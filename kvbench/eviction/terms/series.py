"""TriAttention's score: the attention of a head's mean query to keys, as a series over distances (arXiv 2604.04921).

The score reads two tables, stacked over the layers of the model. `mean` [L, Hq, d] has a head's mean query before RoPE.
`modulus` [L, Hq, d/2] has one number per pair of dimensions that RoPE rotates, in the order of the frequencies: the
query's two numbers in this pair form a vector, and `modulus` is its length, averaged over queries. Dimensions that RoPE
does not rotate have 0 in `modulus`. Layers that methods do not evict have 0 in both tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from kvbench.eviction.learned import Shapes, Sizes, misfit
from kvbench.eviction.view import LayerView
from kvbench.lazy import torch

LEAST = 1e-6  # smallest standard deviation by which scores are divided


def table_shapes(model: Sizes) -> Shapes:
    """Return the shapes of the tables for a model of these sizes."""
    heads = model["num_hidden_layers"], model["num_attention_heads"]
    return {"mean": (*heads, model["head_dim"]), "modulus": (*heads, model["head_dim"] // 2)}


def table_misfit(tensors: Mapping[str, torch.Tensor], model: Sizes) -> str:
    """Return why tensors do not form the tables for a model of these sizes; "" if they do."""
    return misfit(tensors, table_shapes(model))


def series(view: LayerView, reach: int, *, over: Literal["mean", "max"], trig: bool, spread: bool) -> torch.Tensor:
    """Return the score of every entry by every query head of its group, [b, Hk, g, N] float32.

    A score is a norm term plus, if `trig`, the series:

    - The norm term is a sum over the pairs of rotated dimensions: the length of the key's two numbers times a weight.
      The weight is `modulus`; with `spread`, it is `modulus` minus the length of the two numbers in `mean`.
    - The series is the mean or maximum (`over`) of the dot products of the key and the mean query, in the rotated
      dimensions. There is one dot product for each distance 1, 2, 4 ... up to `reach`: in it, the mean query is rotated
      to the position that lies this distance after the next token.
    """
    assert view.rope is not None, "the method must declare Needs(rope=True)"
    b, heads = view.keys.shape[:2]
    keys = torch.where(view.valid[..., None], view.keys.float(), 0.0)
    mean, lengths = view.weights["mean"][view.layer], view.rope.moduli(keys)  # [Hq, d], [b, Hk, N, r/2]
    weight = view.weights["modulus"][view.layer, :, : lengths.shape[-1]]
    weight = weight - view.rope.moduli(mean) if spread else weight
    score = weight.unflatten(0, (heads, -1)) @ lengths.transpose(-1, -2)
    if not trig:
        return score
    offsets = 2 ** torch.arange(reach.bit_length(), device=keys.device)
    ahead = view.rotate(mean[None, :, None].expand(b, -1, len(offsets), -1), view.seen[:, None] + offsets)
    ahead = ahead[..., : 2 * lengths.shape[-1]]
    if over == "mean":  # the score is linear in the query
        ahead = ahead.mean(dim=2, keepdim=True)
    paid = ahead.reshape(b, heads, -1, ahead.shape[-1]) @ keys[..., : ahead.shape[-1]].transpose(-1, -2)
    return score + paid.unflatten(2, (-1, ahead.shape[2])).amax(dim=3)


def standardised(score: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """Standardise the scores [b, Hk, g, N] of each query head: subtract their mean, divide by their standard deviation.
    Only the entries in `among` count in the mean and in the standard deviation."""
    count = among.sum(dim=-1, keepdim=True).clamp_min(1)
    picked = torch.where(among, score.double(), 0.0)  # double, so that padding does not change the rounded sums
    centred = score.double() - picked.sum(dim=-1, keepdim=True) / count
    variance = torch.where(among, centred, 0.0).square().sum(dim=-1, keepdim=True) / count
    return (centred / variance.sqrt().clamp_min(LEAST)).float()
