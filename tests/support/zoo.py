"""Tiny random-weight repositories of real architectures, as they lie on the hub."""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvbench import tiny
from kvbench.engine.model.load import auto_class

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
LAYERS = 2
SIZES: dict[str, Any] = {  # what configurations call their sizes -> a small one
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "out_hidden_size", "projection_dim"), 64),
    **dict.fromkeys(
        ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner", "d_ff", "prefix_dense_intermediate_size"), 96
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(
        ("head_dim", "v_head_dim", "mamba_d_head", "mamba_d_state", "mamba_head_dim", "ssm_state_size"), 16
    ),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "kv_lora_rank", "index_head_dim"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts", "mamba_n_groups"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 4096),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 512),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("linear_num_key_heads", "index_n_heads", "depth", "encoder_layers"), 2),
    **dict.fromkeys(("linear_num_value_heads", "encoder_attention_heads"), 4),
    "q_lora_rank": 24,
    "image_size": 28,
    "patch_size": 14,
    "deepstack_visual_indexes": [0],
    "query_pre_attn_scalar": 16,
    "hidden_size_per_layer_input": 16,
    "sliding_window": 24,
    "num_kv_shared_layers": 0,
    "bos_token_id": 1,
    "eos_token_id": 256,
    "pad_token_id": 257,
    "attention_dropout": 0.0,
}
SOMETIMES_NONE = frozenset({"num_key_value_heads", "head_dim", "q_lora_rank"})  # None means a default of the model


def shrink(kind: type, changes: dict[str, Any] | None = None) -> Any:
    """A small configuration of a class, its parts included. `changes`: what differs, nested as the configuration is."""
    default, changes = kind(), dict(changes or {})
    parts = {name: part for name in kind.sub_configs if (part := getattr(default, name, None)) is not None}
    small = {name: size for name, size in SIZES.items() if name not in parts and _has(default, name)}
    if (kinds := getattr(default, "layer_types", None)) and "layer_types" in inspect.signature(
        kind.__init__
    ).parameters:
        kinds = list(dict.fromkeys(kinds))
        small["layer_types"] = [kinds[i % len(kinds)] for i in range(LAYERS)]
    if "kv_lora_rank" in small:  # latent attention: as many KV heads as query heads, rotation of a part of each
        small |= {"num_key_value_heads": 4} | ({"head_dim": 8} if "head_dim" in small else {})
    for name, part in parts.items():
        small[name] = shrink(type(part), changes.pop(name, None)).to_diff_dict()
    return kind(**small | changes)


def _has(default: Any, name: str) -> bool:
    """Whether a configuration has a size of this name that one number gives."""
    try:
        value = getattr(default, name)
    except AttributeError:
        return False
    except Exception:  # gemma4: one number a layer
        return name == "head_dim"
    if value is None:
        return name in SOMETIMES_NONE
    settable = not isinstance(getattr(type(default), name, None), property)
    return settable and isinstance(value, (int, float, type(None))) is (not isinstance(SIZES[name], list))


def configuration(model_type: str, changes: dict[str, Any]) -> Any:
    return shrink(CONFIG_MAPPING[model_type], changes)


def build(config: Any, seed: int = 0) -> Any:
    """A model whose weights make its answers depend on every token before."""
    torch.manual_seed(seed)
    model = auto_class(config).from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 2.0 * parameter.shape[-1] ** -0.5)
    model.generation_config = transformers.GenerationConfig(eos_token_id=256, pad_token_id=257, do_sample=False)
    return model


def repository(folder: Path, config: Any, seed: int = 0) -> Path:
    """Configuration, safetensors, tokenizer and generation configuration, as on the hub."""
    model = build(config, seed)
    model.save_pretrained(folder)
    if type(model.config) is not type(config):  # the model is a part of the repository
        config.save_pretrained(folder)
    copy_tokenizer(folder)
    return folder


def copy_tokenizer(folder: Path) -> None:
    for name in TOKENIZER:
        shutil.copy(tiny.path() / name, folder / name)
