"""The attention modules of a model, for methods that read them (`Needs.attention`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbench.engine.attention.geometry import LayerGeometry
from kvbench.engine.attention.interface import text_model
from kvbench.errors import UserError, quote
from kvbench.eviction.own_attention import OwnAttention


def own_attention(model: Any, geometry: Sequence[LayerGeometry], classes: Sequence[str]) -> dict[int, OwnAttention]:
    """Return the attention of every layer that methods evict, by layer; {} if `classes` is empty.

    classes: the names of the classes that the method can read. Raises UserError when a layer's attention is of another
    class, or when the model has no rotary embedding that all its layers share.
    """
    if not classes:
        return {}
    text = text_model(model)
    modules = {m.layer_idx: m for m in text.modules() if hasattr(m, "layer_idx") and type(m).__name__ in classes}
    rotary = getattr(getattr(text, "model", text), "rotary_emb", None)
    evicted = [g.index for g in geometry if g.evicts]
    if rotary is None or set(evicted) - modules.keys():
        raise UserError(
            f"the method reads the attention of {', '.join(classes)}; model type {quote(model.config.model_type)} has "
            "none of these in some layer. Use another method."
        )
    return {index: OwnAttention(modules[index], rotary) for index in evicted}
