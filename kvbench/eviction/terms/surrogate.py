"""KVzap's surrogate: a small network per layer that reads a token's hidden state and predicts the worth of its entries.

arXiv 2601.07891: log worth = out(gelu(in(x))) per KV head, with the exact GELU, or out(x) alone (the linear form).
Tensors, stacked over the layers of the model (I: the width, D: hidden size):

    in.weight  [L, I, D]   in.bias  [L, I]          the linear form has none
    out.weight [L, Hk, I]  out.bias [L, Hk]         linear: [L, Hk, D]
"""

from __future__ import annotations

from collections.abc import Mapping

from kvbench.eviction.learned import Shapes, Sizes, misfit
from kvbench.eviction.new_tokens import NewTokens
from kvbench.lazy import torch

SHARE = 8  # hidden size of the model / width of the hidden layer, by default


def surrogate_shapes(model: Sizes, width: int | None = None) -> Shapes:
    """Return the shapes of a surrogate's tensors for a model. width: units of the hidden layer. 0: the linear form,
    which has no hidden layer. None: an eighth of the hidden size."""
    layers, heads, size = model["num_hidden_layers"], model["num_key_value_heads"], model["hidden_size"]
    if width == 0:
        return {"out.weight": (layers, heads, size), "out.bias": (layers, heads)}
    width = width or max(1, size // SHARE)
    shapes: Shapes = {"in.weight": (layers, width, size), "in.bias": (layers, width)}
    return shapes | {"out.weight": (layers, heads, width), "out.bias": (layers, heads)}


def surrogate_misfit(tensors: Mapping[str, torch.Tensor], model: Sizes) -> str:
    """Return why tensors do not form a surrogate for a model of these sizes; "" if they do."""
    first = tensors.get("in.weight")
    return misfit(tensors, surrogate_shapes(model, 0 if first is None else first.shape[1] if first.dim() == 3 else 1))


def log_worth(new: NewTokens) -> torch.Tensor:
    """Return the logarithms of the worths that the surrogate in `new.weights` predicts for new tokens, [b, Hk, t]
    float32."""
    w, linear, x = new.weights, torch.nn.functional.linear, new.hidden.float()
    if "in.weight" in w:
        x = torch.nn.functional.gelu(linear(x, w["in.weight"][new.layer], w["in.bias"][new.layer]))
    return linear(x, w["out.weight"][new.layer], w["out.bias"][new.layer]).transpose(1, 2)
