"""Weights that were trained for a model, as a method asks for them: what they are called, and which ones fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvbench.eviction.api import Weights
from kvbench.lazy import torch

Shapes = dict[str, tuple[int, ...]]
Sizes = Mapping[str, int]  # of a model, named as in its configuration: num_hidden_layers, hidden_size ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedWeights(Weights):
    """Weights that nothing but training makes.

    Attributes:
        what: the word for them in messages: "gate", "scorer".
        option: of the method, the one that names the file.
        shapes: the tensors that a model of these sizes needs, for drawing some at random.
        check: says why tensors do not fit the method's options and these sizes; nothing where they do.
    """

    what: str
    option: str
    shapes: Callable[[Sizes], Shapes]
    check: Callable[[Mapping[str, torch.Tensor], Sizes], str]


def misfit(tensors: Mapping[str, torch.Tensor], shapes: Shapes) -> str:
    """The first tensor that is missing, too much or of another shape, in words; nothing where all fit."""
    for name in sorted(tensors.keys() | shapes.keys()):
        found = list(tensors[name].shape) if name in tensors else "missing"
        wanted = list(shapes[name]) if name in shapes else "not expected"
        if found != wanted:
            return f"{name} is {found}, {wanted} for this model" if name in shapes else f"{name} is {wanted}"
    return ""
