"""A model folder and configurations for whole runs."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from kvbench import tiny
from kvbench.config.run_config import Grid, MethodChoice, RunConfig

CONFIGS = {
    "qwen3": ("Qwen3Config", dict(head_dim=16)),
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "mistral": ("MistralConfig", dict(head_dim=16, sliding_window=None)),
    "gemma2": ("Gemma2Config", dict(head_dim=16, query_pre_attn_scalar=16)),
}


def model_folder(folder: Path, name: str = "qwen3") -> Path:
    """A random-weight model with the built-in tokenizer, as a user would have it on disk."""
    config_name, changes = CONFIGS[name]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.path())
    config = getattr(transformers, config_name)(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=32768,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        **changes,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def configuration(model: Path, **changes: object) -> RunConfig:
    """Two evicting methods and the full cache on the short cell of `walk`."""
    grid = Grid(
        methods=tuple(MethodChoice(name=n) for n in ("full", "gkv", "h2o")), budgets=(32,), tasks=("walk/orbit-100",)
    )
    settings = dict(model=str(model), interval=16, limit=12, samples=2, temperature=1.0, max_new_tokens=60, slots=5)
    return RunConfig(grids=(grid,), **settings | changes)
