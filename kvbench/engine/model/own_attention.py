"""The attention modules of a model, for methods that read them (`Needs.attention`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from kvbench.engine.attention.geometry import LayerGeometry
from kvbench.engine.attention.interface import text_model
from kvbench.errors import UserError, quote
from kvbench.eviction.view import OwnAttention


def own_attention(model: Any, geometry: Sequence[LayerGeometry], classes: Sequence[str]) -> dict[int, OwnAttention]:
    """Return the attention module of every layer that is evicted, by the layer's index; {} if `classes` is empty.

    classes: the names of the classes that the method can read. Raises UserError when the attention of an evicted
    layer is of another class, or when the model has no rotary embedding that all its layers share.
    """
    if not classes:
        return {}
    text = text_model(model)
    modules = {m.layer_idx: m for m in text.modules() if hasattr(m, "layer_idx") and type(m).__name__ in classes}
    rotary = getattr(getattr(text, "model", text), "rotary_emb", None)
    evicted = [g.index for g in geometry if g.evicts]
    if rotary is None or set(evicted) - modules.keys():
        raise UserError(
            f"the method reads only attention of class {', '.join(classes)}; model type "
            f"{quote(model.config.model_type)} has a layer with attention of another class, or its layers do not share "
            "one rotary embedding. Use another method."
        )
    where = {g.index: g.device for g in geometry}
    return {
        index: OwnAttention(modules[index], rotary if where[index] is None else partial(_beside, rotary))
        for index in evicted
    }


def _beside(rotary: Any, like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return RoPE's cosines and sines on the device of `like`: in a divided model RoPE may be on another device."""
    cosines, sines = rotary(like, positions)
    return cosines.to(like.device), sines.to(like.device)
