"""How a method declares its trained weights: tensor names and shapes, and a check that they fit a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvbench.eviction.api import Weights
from kvbench.lazy import torch

Shapes = dict[str, tuple[int, ...]]
Sizes = Mapping[str, int]  # sizes of a model by their names in its configuration: num_hidden_layers, hidden_size ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedWeights(Weights):
    """Weights that only training can make, with their tensor shapes and a check that they fit a model."""

    what: str  # their name in messages: "gate", "scorer"
    option: str  # the method's option that names the file
    shapes: Callable[[Sizes], Shapes]  # for a model of given sizes; tests draw random weights of these shapes
    check: Callable[[Mapping[str, torch.Tensor], Sizes], str]  # why tensors do not fit options and sizes; "" if they do


def misfit(tensors: Mapping[str, torch.Tensor], shapes: Shapes) -> str:
    """Return a message about the first tensor that is missing, unexpected or misshapen; "" if all fit."""
    for name in sorted(tensors.keys() | shapes.keys()):
        shape = list(tensors[name].shape) if name in tensors else "missing"
        wanted = list(shapes[name]) if name in shapes else "not expected"
        if shape != wanted:
            return f"{name} is {shape}; this model needs {wanted}" if name in shapes else f"{name} is {wanted}"
    return ""
