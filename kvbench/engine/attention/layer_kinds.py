"""The kinds of layers that a transformers configuration names, and the configurations that the engine refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.errors import UserError, quote

ATTENDING = frozenset({"full_attention", "sliding_attention", "deepseek_sparse_attention"})
STATEFUL = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})  # hybrids: also K, V
MEMORYLESS = frozenset({"moe", "mlp"})  # only a feed-forward part
SLIDING = frozenset({"sliding_attention", "hybrid_sliding"})
OWN_POSITIONS = frozenset({"kosmos_2_5_text_model"})  # model types whose positions do not begin at 0


def refuse_unsupported(config: Any) -> None:
    """Raise UserError for a configuration that the engine would run with wrong results."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or [])
    foreign = kinds - ATTENDING - STATEFUL - MEMORYLESS
    name = quote(text.model_type)
    if foreign:
        raise UserError(
            f"model type {name} has layers of kind {', '.join(sorted(foreign))}, which are not supported. "
            "Choose another model."
        )
    if getattr(text, "index_kpool", None):
        raise UserError(
            f"model type {name} has an indexer that chooses pools of neighbouring tokens, which evictions would tear "
            "apart. Choose another model."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(
            f"model type {name} is an encoder-decoder; kvbench supports decoder-only models. Choose another model."
        )
    if text.model_type in OWN_POSITIONS:
        raise UserError(
            f"model type {name} counts positions from a number other than 0, which kvbench does not support. "
            "Choose another model."
        )
    if getattr(text, "attn_temperature_tuning", False) and not all(getattr(text, "no_rope_layers", None) or [0]):
        raise UserError(
            f"model type {name} scales the queries of layers without RoPE by the number of tokens in transformers' "
            "cache, which holds none under kvbench. Choose another model."
        )
    rope = getattr(text, "rope_parameters", None) or {}
    longest = getattr(text, "max_position_embeddings", 0) or 0
    kind, before = rope.get("rope_type"), rope.get("original_max_position_embeddings") or longest
    if kind in ("dynamic", "longrope") and longest > before:
        raise UserError(
            f"model type {name} uses {kind} RoPE, whose frequencies depend on the longest sequence of a batch, so "
            f"that sequences would change each other's answers. Set max_position_embeddings to {before}"
            f"{_same_attention(rope, longest / before)} in the model's config.json."
        )


def _same_attention(rope: Mapping[str, Any], factor: float) -> str:
    """Return what else a user must set in config.json, so that a smaller `max_position_embeddings` does not change the
    model: transformers multiplies longrope's cosines by a number that depends on `factor`, by default the largest
    position over the original one."""
    derived = rope.get("factor") is None and rope.get("attention_factor") is None
    return f" and, beside long_factor, factor to {factor}" if rope["rope_type"] == "longrope" and derived else ""
