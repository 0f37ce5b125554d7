"""LoRA adapters for tests: written by hand as peft writes them, or trained with peft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

PLAIN = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["q_proj"], "init_lora_weights": True}


def write(folder: Path, tensors: dict[str, torch.Tensor], **changes: Any) -> Path:
    """Write an adapter; tensors: by the name of the parameter within the model, ``...q_proj.lora_A``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(PLAIN | changes))
    named = {f"base_model.model.{name}.weight": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    return folder


def low_rank(model: Any, suffix: str = "q_proj", rank: int = 2, seed: int = 0, scale: float = 0.5) -> dict[str, Any]:
    """Random factors A [rank, in] and B [out, rank] for every linear layer of a model whose name ends with `suffix`."""
    random = torch.Generator().manual_seed(seed)
    factors = {}
    for name, layer in model.named_modules():
        if name.endswith(suffix):
            rows, columns = layer.weight.shape
            factors[f"{name}.lora_A"] = scale * torch.randn(rank, columns, generator=random)
            factors[f"{name}.lora_B"] = scale * torch.randn(rows, rank, generator=random)
    return factors


def train(model: Any, folder: Path, steps: int = 2) -> Path:
    """Train an adapter for a few steps on random tokens with peft, and save it."""
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj", "down_proj"])
    wrapped = peft.get_peft_model(model, config)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=50.0)
    ids = torch.randint(0, 256, (2, 32))
    for _ in range(steps):
        wrapped(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    wrapped.save_pretrained(folder)
    return folder
