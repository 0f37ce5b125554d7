"""Loads the image processor of a model's repository, or says why the model cannot read images."""

from __future__ import annotations

import importlib.util
from typing import Any

from transformers.processing_utils import ProcessorMixin

from kvbench.errors import SetupError, UserError, quote
from kvbench.sources import image_files, models
from kvbench.sources.refusals import check_images_of
from kvbench.taskkit.vision import Vision


def load(name: str, where: str, revision: str | None, config: Any, tokenizer: Any) -> Vision:
    """Load what is needed to put images into prompts.

    name: the model's, for messages. where: its folder or its name on the hub. Raises UserError for a model
    whose images the engine does not read, SetupError if files or Pillow are missing.
    """
    check_images_of(config.to_dict(), name)
    if importlib.util.find_spec("PIL") is None:
        raise SetupError(f"questions with images need Pillow. {image_files.EXTRA}")
    with models.reading(name, where):
        processor = _processor(name, where, revision)
        template = ProcessorMixin.get_processor_dict(where, revision=revision)[0].get("chat_template")
    if "image_grid_thw" not in processor.model_input_names:
        raise UserError(
            f"model {quote(name)} (model type {quote(config.model_type)}): tasks cannot place its images in prompts, "
            f"because its image processor {quote(type(processor).__name__)} gives no grid of patches. "
            "Choose a model like Qwen3-VL or GLM-4V."
        )
    if isinstance(template, dict):  # several templates by name
        template = template.get("default")
    token = config.image_token_id
    return Vision(processor=processor, token=token, text=str(tokenizer.convert_ids_to_tokens(token)), template=template)


def _processor(name: str, where: str, revision: str | None) -> Any:
    # transformers 5.17 offers its top-level name only beside torchvision, which kvbench does not need.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    try:  # use_fast: as transformers 5.2 calls the backend
        return AutoImageProcessor.from_pretrained(
            where, revision=revision, backend="pil", use_fast=False, trust_remote_code=False
        )
    except OSError as error:
        if "preprocessor_config.json" not in str(error):
            raise
        raise SetupError(f"model {quote(name)} has no preprocessor_config.json. Copy it beside its weights.") from None
