"""Loads the image processor of a model's repository, or says why the model cannot read images."""

from __future__ import annotations

import importlib.util
from typing import Any

from transformers.processing_utils import ProcessorMixin

from kvbench.errors import SetupError, UserError, quote
from kvbench.sources import image_files, models
from kvbench.taskkit.vision import Vision


def load(name: str, where: str, revision: str | None, config: Any, tokenizer: Any) -> Vision:
    """Load what is needed to put images into prompts.

    name: the model's, for messages. where: its folder or its name on the hub. Raises UserError for a model that reads
    text only or is of a family that kvbench cannot show images, SetupError if files or Pillow are missing.
    """
    token = getattr(config, "image_token_id", None)
    if getattr(config, "vision_config", None) is None or token is None:
        raise UserError(f"model {quote(name)} ({config.model_type}) reads text only. Choose a vision-language model.")
    if importlib.util.find_spec("PIL") is None:
        raise SetupError(f"questions with images need Pillow. {image_files.EXTRA}")
    with models.reading(name, where):
        processor = _processor(name, where, revision)
        template = ProcessorMixin.get_processor_dict(where, revision=revision)[0].get("chat_template")
    if "image_grid_thw" not in processor.model_input_names or not hasattr(processor, "get_number_of_image_patches"):
        raise UserError(
            f"model {quote(name)} ({config.model_type}): its image processor gives no grid of patches, so that kvbench "
            "cannot place its images. Choose a model like Qwen2.5-VL or Qwen3-VL."
        )
    if isinstance(template, dict):  # several templates by name
        template = template.get("default")
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
