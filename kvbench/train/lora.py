"""A LoRA adapter (arXiv 2106.09685) as the only trained part of a model: peft attaches it and switches it off.

An adapted layer computes W x + (alpha / rank) B A x. Only A and B are trained, in float32; B begins with 0, so that the
adapter begins without effect. While the adapter is switched off, the model predicts exactly as the original.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kvbench.engine.attention.interface import text_model
from kvbench.engine.model.layer_weights import NAMES
from kvbench.errors import UserError, quote
from kvbench.eviction.api import Method
from kvbench.sources.adapters import WEIGHTS, require_packages
from kvbench.sources.quantised import silence_bitsandbytes
from kvbench.train.entry import check_least

NAME = "default"  # peft's name for the adapter


def check(model: Any, method: Method, more: Mapping[str, Any]) -> None:
    """Raise UserError for invalid settings of an adapter, SetupError if peft is missing.

    method: the method that evicts during the training; more: the training's settings by name. If the settings ask for
    no adapter (rank 0), nothing else is checked.
    """
    check_least(more, lora=0)
    if not more["lora"]:
        return
    require_packages("--opt lora")
    if not more["lora_alpha"] > 0:
        raise UserError(f"--opt lora_alpha must be above 0; got {more['lora_alpha']:g}.")
    changed = {name.rpartition(".")[2] for name in _places(model, more["lora_places"])}
    if read := changed & {name for kind in method.needs().layer_weights for name in NAMES[kind]}:
        raise UserError(
            f"method {quote(more['method'])} reads the weights of {read.pop()}, which an adapter would change. Name "
            "other layers with --opt lora_places, or train all weights with --opt lora=0."
        )


class Lora:
    """An adapter in the linear layers of a model. Creating it freezes all other weights of the model."""

    def __init__(self, model: Any, more: Mapping[str, Any], seed: int) -> None:
        """Attach a new adapter to a model. more: the training's settings by name, which `check` has accepted. seed:
        determines the initial values of A."""
        silence_bitsandbytes()
        from peft import LoraConfig, get_peft_model

        places = _places(model, more["lora_places"])
        config = LoraConfig(r=int(more["lora"]), lora_alpha=more["lora_alpha"], target_modules=places)
        devices = [p.device for p in model.parameters() if p.device.type == "cuda"][:1]
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            self.attached = get_peft_model(model, config)
        self.model = model.eval()

    @contextmanager
    def switched_off(self) -> Iterator[Any]:
        """Yield the model; inside the `with` statement its adapter is off, so it predicts as the original model."""
        with self.attached.disable_adapter():
            yield self.model

    def save(self, folder: Path, base_model: str) -> None:
        """Write the adapter into a new folder, in peft's form. base_model: the name of the original model."""
        from peft import get_peft_model_state_dict

        config: Any = self.attached.peft_config[NAME]
        config.base_model_name_or_path, config.inference_mode = base_model, True
        config.target_modules = sorted(config.target_modules)  # peft's set would have a random order in the file
        config.save_pretrained(str(folder))
        tensors = get_peft_model_state_dict(self.attached, save_embedding_layers=False)
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)


def _places(model: Any, wanted: str) -> list[str]:
    """Return the full names of the decoder's linear layers that get an adapter.

    wanted: the last parts of the layers' names, separated by commas, such as "q_proj,v_proj"; or "all" for all layers.
    Raises UserError for an unknown name, or if the decoder has no linear layers.
    """
    inside = {id(module) for module in text_model(model).modules() if type(module) is torch.nn.Linear}
    inside.discard(id(model.get_output_embeddings()))
    found = [name for name, module in model.named_modules() if id(module) in inside]
    last = {name: name.rpartition(".")[2] for name in found}
    known = sorted(set(last.values()))
    names = known if wanted == "all" else [name.strip() for name in wanted.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"--opt lora_places must be all, or names from {', '.join(known)}; got {quote(unknown[0])}.")
    if not found:
        raise UserError(f"{quote(type(model).__name__)} has no linear layers in its decoder; use --opt lora=0.")
    return [name for name in found if last[name] in names]
