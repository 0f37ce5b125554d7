"""Writes the folder of a trained model or adapter and, beside this folder, the card: a JSON file about the training."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvbench import __version__
from kvbench.engine.model.load import LoadedModel
from kvbench.engine.model.weights import Base, card_path, config_hash, model_fields
from kvbench.errors import SetupError, quote
from kvbench.store.files import reason, remedy, replacing
from kvbench.store.tables import sha256

# Files for images and conversations that neither a model nor its tokenizer need have written.
PROCESSOR = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.jinja",
    "chat_template.json",
)


def write_model(loaded: LoadedModel, folder: Path) -> None:
    """Write configuration, weights and tokenizer of a model, and its files for images, into a folder that transformers
    can load."""
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    for name in PROCESSOR:
        if loaded.folder and (loaded.folder / name).is_file() and not (folder / name).exists():
            shutil.copyfile(loaded.folder / name, folder / name)


def save_folder(
    folder: Path, write: Callable[[Path], None], base: Base, *, made: Mapping[str, Any]
) -> tuple[Path, dict[str, Any]]:
    """Replace a folder by one that `write` fills, and write a card beside it; return folder and card.

    base: the model before the training. made: facts about the training for the card. Raises SetupError when a file
    cannot be written.
    """
    part = folder.with_name(f".{folder.name}.part")  # replaces the folder once it is complete
    try:
        shutil.rmtree(part, ignore_errors=True)
        write(part)
        card = {
            "format": f"kvbench-{folder.name}/1",
            "base_model": base.name,
            "model": model_fields(base.config),
            "config_sha256": config_hash(base.config),
            "sha256": {path.name: sha256(path) for path in sorted(part.glob("*.safetensors"))},
            "kvbench": __version__,
            "made": dict(made),
        }
        for path in part.iterdir():
            path.chmod(0o644)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
        with replacing(card_path(folder)) as file:
            file.write((json.dumps(card, indent=2) + "\n").encode())
        card_path(folder).chmod(0o644)
    except OSError as error:
        raise SetupError(
            f"{quote(error.filename or folder)} cannot be written: {reason(error)}; {remedy(error)}, then run the "
            "command again."
        ) from error
    return folder, card
