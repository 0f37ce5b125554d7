"""The model shapes and the baselines that `kvbench bench` knows by name.

A shape is a model family with its sizes. A baseline is a system that is measured beside the engine. This module does
not import torch, so that names are checked quickly.
"""

from __future__ import annotations

from typing import Any

_SMALL: dict[str, Any] = dict(vocab_size=4096, num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True)
# Name of the shape -> (transformers' model family, arguments of its configuration).
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "A": ("Qwen3", dict(_SMALL, hidden_size=256, intermediate_size=768, num_hidden_layers=4, head_dim=32)),
    "B": ("Qwen3", dict(_SMALL, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, head_dim=64)),
    "qwen3-4b": (
        "Qwen3",
        dict(
            vocab_size=151936,
            num_attention_heads=32,
            num_key_value_heads=8,
            tie_word_embeddings=True,
            hidden_size=2560,
            intermediate_size=9728,
            num_hidden_layers=36,
            head_dim=128,
        ),
    ),
    "r1-distill-qwen-7b": (
        "Qwen2",
        dict(
            vocab_size=152064,
            num_attention_heads=28,
            num_key_value_heads=4,
            tie_word_embeddings=False,
            hidden_size=3584,
            intermediate_size=18944,
            num_hidden_layers=28,
        ),
    ),
    "llama-3.1-8b": (  # also of DeepSeek-R1-Distill-Llama-8B
        "Llama",
        dict(
            vocab_size=128256,
            num_attention_heads=32,
            num_key_value_heads=8,
            tie_word_embeddings=False,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
        ),
    ),
}
# Most tokens of a prompt with its answer. Some released models have fewer positions, but random weights have no
# quality to lose.
LONGEST = 131_072
BASELINES = ("transformers", "continuous", "vllm")
