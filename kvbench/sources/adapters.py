"""Finds a LoRA adapter on the disk and identifies it by its files. Imports neither torch nor peft.

An adapter is a folder as peft writes it, with the files `CONFIG` and `WEIGHTS`. kvbench looks neither for an adapter on
the hub, nor for the base model that the adapter's configuration names.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.errors import SetupError, UserError, quote
from kvbench.sources import model_files, model_weights

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
LORA = "LORA"
PROMPTS = (  # types of adapters that learn a prompt, which peft cannot merge into the model's weights either
    *("PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "ADAPTION_PROMPT", "CPT"),
)
MERGE = "Merge it with peft (merge_and_unload, save_pretrained) and give the merged folder with --model"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter: its folder, its configuration, and the hashes of its files."""

    folder: Path
    config: Mapping[str, Any]
    files: Mapping[str, str]

    @property
    def weights(self) -> Path:
        return self.folder / WEIGHTS

    @property
    def identity(self) -> str:
        """The folder's name and a hash over the files, in the form that rows store: ``my-lora@0123456789abcdef``."""
        return f"{self.folder.name}@{model_files.combined(self.files)}"


def find(name: str | None) -> Adapter | None:
    """Find the adapter in the folder that --adapter names. name: the value of --adapter; None: return None.

    Raises SetupError if the folder, one of its files, peft or accelerate is missing, or if a file is damaged. Raises
    UserError if the adapter is not a LoRA.
    """
    if name is None:
        return None
    folder = Path(os.path.abspath(os.path.expanduser(name)))
    if not folder.is_dir():
        why = f"{quote(name)} is a file" if folder.exists() else f"adapter folder {quote(name)} does not exist"
        raise SetupError(f"{why}; --adapter takes a folder that peft has saved.")
    if not (folder / CONFIG).is_file():
        raise SetupError(f"{quote(name)} has no {CONFIG}; it is not an adapter of peft.")
    config = model_weights.read_json(folder / CONFIG)
    if (kind := config.get("peft_type")) != LORA:
        cure = "Its learned prompt cannot be merged into weights; train a LoRA adapter" if kind in PROMPTS else MERGE
        raise UserError(f"adapter {quote(name)} is of type {quote(kind)}; kvbench merges {LORA} only. {cure}.")
    if not (folder / WEIGHTS).is_file():
        if (folder / PICKLE).is_file():
            raise SetupError(
                f"adapter {quote(name)} has only pickle weights ({PICKLE}), and kvbench loads safetensors only; load "
                f"it with peft and save it again, which writes {WEIGHTS}."
            )
        raise SetupError(f"adapter {quote(name)} has no {WEIGHTS}. Copy it again.")
    model_weights.check_file(folder / WEIGHTS)
    require_packages("--adapter")
    return Adapter(
        folder=folder, config=config, files={file: model_files.file_hash(folder / file) for file in (CONFIG, WEIGHTS)}
    )


def require_packages(option: str) -> None:
    """Raise SetupError if a package for adapters is missing. option: the user's option that needs these packages."""
    if missing := [package for package in ("peft", "accelerate") if importlib.util.find_spec(package) is None]:
        raise SetupError(f"{option} needs {' and '.join(missing)}: pip install 'kvbench[adapters]'.")
