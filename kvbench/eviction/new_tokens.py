"""What a method sees of tokens that enter the cache: their hidden states, keys and values in one layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvbench.lazy import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTokens:
    """The input of `Method.on_tokens`: t new tokens of each of b sequences in one layer."""

    layer: int
    hidden: torch.Tensor  # [b, t, D] input of the layer's attention: the hidden state after the input norm
    keys: torch.Tensor  # [b, Hk, t, d] post-RoPE
    values: torch.Tensor  # [b, Hk, t, dv]
    # [b, t] bool, the tokens whose text consists of the characters `Needs.marks` and of white space; None if
    # `Needs.marks` is empty.
    marks: torch.Tensor | None = None
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)  # of the whole model, see `Method.weights`
    # The model's own matrices in this layer, as named in `Needs.layer_weights`, in the model's dtype:
    # "o_proj" [Hq, dv, D], which maps the output of each query head to the hidden state.
    layer_weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
