"""`OwnAttention`: the model's own attention module of a layer, for methods whose code expects a transformers module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvbench.lazy import torch


@dataclass(frozen=True, slots=True)
class OwnAttention:
    """The attention module of a layer, and the rotary embedding of its model. Methods must change neither.

    rotary: called with any tensor and positions [b, t], returns RoPE's cosines and sines, [b, t, d] each, in the dtype
    of that tensor.
    """

    module: Any
    rotary: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
