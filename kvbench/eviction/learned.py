"""Trained weights as a method declares them: their names, their shapes, and a check that they fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvbench.eviction.api import Weights
from kvbench.lazy import torch

Shapes = dict[str, tuple[int, ...]]
Sizes = Mapping[str, int]  # of a model, named as in its configuration: num_hidden_layers, hidden_size ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedWeights(Weights):
    """Weights that only training makes.

    Attributes:
        what: their name in messages: "gate", "scorer".
        option: the method's option that names the file.
        shapes: the tensors for a model of these sizes, so that a test can draw random ones.
        check: why tensors do not fit the method's options and these sizes; "" if they do.
    """

    what: str
    option: str
    shapes: Callable[[Sizes], Shapes]
    check: Callable[[Mapping[str, torch.Tensor], Sizes], str]


def misfit(tensors: Mapping[str, torch.Tensor], shapes: Shapes) -> str:
    """The first tensor that is missing, unexpected or of another shape, in words; "" if all fit."""
    for name in sorted(tensors.keys() | shapes.keys()):
        shape = list(tensors[name].shape) if name in tensors else "missing"
        wanted = list(shapes[name]) if name in shapes else "not expected"
        if shape != wanted:
            return f"{name} is {shape}, {wanted} for this model" if name in shapes else f"{name} is {wanted}"
    return ""
