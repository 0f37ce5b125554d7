"""The model's own matrices that methods read (`Needs.layer_weights`): views of its parameters, without a copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers.pytorch_utils import Conv1D

from kvbench.engine.attention.geometry import LayerGeometry
from kvbench.engine.attention.interface import text_model
from kvbench.errors import UserError, quote
from kvbench.eviction.api import Method
from kvbench.eviction.declare import LayerWeight
from kvbench.sources import quantised

# Matrix -> the names that it has in transformers' models.
NAMES: dict[LayerWeight, tuple[str, ...]] = {"o_proj": ("o_proj", "out_proj", "dense", "c_proj", "wo")}


def refuse_quantised(name: str, method: Method, config: Any) -> None:
    """Raise UserError if a method reads matrices that stay quantised in memory. name: the method's name. config: the
    model's transformers configuration."""
    form = quantised.form_of(config.to_dict()) if method.needs().layer_weights else None
    if form is not None and form.kept:
        raise UserError(
            f"method {quote(name)} reads the output projection of attention, which stays quantised ({form.name}) in "
            "memory. Use another method, or weights that are not quantised."
        )


def layer_weights(
    model: Any, geometry: Sequence[LayerGeometry], names: Sequence[LayerWeight]
) -> dict[int, Mapping[str, torch.Tensor]]:
    """Return the matrices `names` of every evicted layer, by the layer's index; their shapes are those in `NewTokens`.

    geometry: the cache's geometry. Raises UserError when a matrix has none of its `NAMES`, is quantised, is divided
    among devices, is offloaded, or has the wrong size.
    """
    evicted = [g for g in geometry if g.evicts] if names else []
    return {g.index: {name: _by_head(model, g, name) for name in names} for g in evicted}


def _by_head(model: Any, g: LayerGeometry, name: LayerWeight) -> torch.Tensor:
    """Return a layer's output projection [query heads, dimension of a value, hidden size]."""
    inputs, why = g.query_heads * g.read_dim, "was not found"
    planned = all(parameter.is_meta for parameter in model.parameters())  # a rehearsal's model has no weights
    modules = [m for m in text_model(model).modules() if getattr(m, "layer_idx", None) == g.index]
    found = [getattr(m, known) for known in NAMES[name] for m in modules if hasattr(m, known)]
    for layer in found:
        if type(layer) not in (torch.nn.Linear, Conv1D) or is_traceable_wrapper_subclass(layer.weight.data):
            why = "is quantised or divided among devices"
            continue
        if layer.weight.is_meta and not planned:
            why = "is offloaded"
            continue
        matrix = layer.weight.detach() if isinstance(layer, Conv1D) else layer.weight.detach().T  # [inputs, D]
        if len(matrix) == inputs:
            return matrix.unflatten(0, (g.query_heads, g.read_dim))
        why = f"reads {len(matrix)} numbers, not {g.query_heads} heads x {g.read_dim}"
    raise UserError(
        f"the method needs the output projection of attention, which {why} in layer {g.index} of model type "
        f"{quote(model.config.model_type)}. Use another method, or unquantised weights on one device."
    )
