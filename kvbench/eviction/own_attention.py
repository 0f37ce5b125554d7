"""A layer's attention as the model itself has it, for methods that call code written for transformers' modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvbench.lazy import torch


@dataclass(frozen=True, slots=True)
class OwnAttention:
    """The attention module of a layer, and the rotary embedding of its model. Methods must not change either.

    rotary: maps a tensor of the wanted dtype and positions [b, t] to the cosines and sines [b, t, d] of RoPE.
    """

    module: Any
    rotary: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
