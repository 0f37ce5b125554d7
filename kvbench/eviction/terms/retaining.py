"""Locret's retaining heads: a small network per layer that reads a token's hidden state and scores its entries.

arXiv 2410.01805: score per KV head = out silu(in x), with matrices `in` and `out` and the hidden state x. The released
heads read the queries, keys and values of the token before rotation, [q; k; v] = W x; here one trained matrix, `in`,
stands for the product of their first matrix and W.
Tensors, stacked over the layers of the model (I: the width, D: hidden size):

    in.weight [L, I, D]   out.weight [L, Hk, I]
"""

from __future__ import annotations

from collections.abc import Mapping

from kvbench.eviction.learned import Shapes, Sizes, misfit
from kvbench.eviction.new_tokens import NewTokens
from kvbench.lazy import torch

WIDTH = 1024  # of the published heads


def retaining_shapes(model: Sizes, width: int | None = None) -> Shapes:
    """Return the shapes of the heads' tensors for a model. width: hidden units; None: 1024, as published."""
    layers, heads, size = model["num_hidden_layers"], model["num_key_value_heads"], model["hidden_size"]
    width = width or WIDTH
    return {"in.weight": (layers, width, size), "out.weight": (layers, heads, width)}


def retaining_misfit(tensors: Mapping[str, torch.Tensor], model: Sizes) -> str:
    """Return why tensors do not form retaining heads for a model of these sizes; "" if they do."""
    first = tensors.get("in.weight")
    return misfit(tensors, retaining_shapes(model, first.shape[1] if first is not None and first.dim() == 3 else None))


def retained(new: NewTokens) -> torch.Tensor:
    """Return the scores that the heads in `new.weights` give new tokens, [b, Hk, t] float32."""
    w, linear = new.weights, torch.nn.functional.linear
    inner = torch.nn.functional.silu(linear(new.hidden.float(), w["in.weight"][new.layer]))
    return linear(inner, w["out.weight"][new.layer]).transpose(1, 2)
