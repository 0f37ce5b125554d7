"""The weights of the built-in model, in a folder that transformers loads as it is.

    AutoModelForCausalLM.from_pretrained(kvbench.tiny.path())

Made by `python -m kvbench.train.tiny`; `card.json` says from what and how well it does. This file imports no torch.
"""

from __future__ import annotations

from pathlib import Path


def path() -> Path:
    """The folder with model.safetensors, config.json, the tokenizer and card.json."""
    return Path(__file__).parent
