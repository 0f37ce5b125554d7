"""Writes a trained model as a folder that transformers and kvbench can load, and a card beside the folder.

save_model(out / "model", loaded, base_model="tiny", made={...})     # out/model/, out/model.json
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvbench import __version__
from kvbench.engine.model.load import LoadedModel
from kvbench.engine.model.weights import config_hash, model_fields
from kvbench.errors import SetupError, quote
from kvbench.store.files import reason, replacing

FORMAT = "kvbench-model/1"


def save_model(
    folder: Path, loaded: LoadedModel, *, base_model: str, made: Mapping[str, Any]
) -> tuple[Path, dict[str, Any]]:
    """Write configuration, weights, tokenizer and card; return the folder and the card.

    Raises SetupError when a file cannot be written.
    """
    config = loaded.model.config
    part = folder.with_name(f".{folder.name}.part")  # replaces the folder once it is complete
    try:
        shutil.rmtree(part, ignore_errors=True)
        loaded.model.save_pretrained(part)
        loaded.tokenizer.save_pretrained(part)
        card = {
            "format": FORMAT,
            "base_model": base_model,
            "model": model_fields(config),
            "config_sha256": config_hash(config),
            "sha256": {path.name: _hash(path) for path in sorted(part.glob("*.safetensors"))},
            "kvbench": __version__,
            "made": dict(made),
        }
        for path in part.iterdir():
            path.chmod(0o644)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
        with replacing(folder.with_suffix(".json")) as file:
            file.write((json.dumps(card, indent=2) + "\n").encode())
        folder.with_suffix(".json").chmod(0o644)
    except OSError as error:
        raise SetupError(f"{quote(error.filename or folder)} cannot be written: {reason(error)}.") from error
    return folder, card


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
