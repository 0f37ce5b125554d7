"""The weights of the built-in model, in a folder that transformers can load.

    AutoModelForCausalLM.from_pretrained(kvbench.tiny.path())

`python -m kvbench.train.tiny` made them; `card.json` has the recipe and the accuracies. This file imports no torch.
"""

from __future__ import annotations

from pathlib import Path


def path() -> Path:
    """Return the folder with model.safetensors, config.json, the tokenizer and card.json."""
    return Path(__file__).parent
