"""Loads the image processor of a model's repository, or says why the model cannot read images."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import partial
from typing import Any

from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name
from transformers.processing_utils import ProcessorMixin

from kvbench.console import faults
from kvbench.errors import SetupError, UserError, quote
from kvbench.sources import image_files, models
from kvbench.sources.refusals import check_images_of
from kvbench.taskkit.vision import Vision

COUNTED = ("InternVLProcessor", "LlavaOnevisionProcessor", "LlavaProcessor")  # see `_counted`
SAMPLE = (48, 32)  # width and height of an image in pixels


def load(name: str, where: str, revision: str | None, config: Any, tokenizer: Any) -> Vision:
    """Load the model's image processor and the settings for putting images into prompts, as a `Vision`.

    name: the model's name, for messages. where: the model's folder or its name on the hub. Raises UserError if the
    engine does not read the model's images, or if tasks cannot place these images in prompts. Raises SetupError if
    files or Pillow are missing.
    """
    check_images_of(config.to_dict(), name)
    if importlib.util.find_spec("PIL") is None:
        raise SetupError(f"questions with images need Pillow. {image_files.EXTRA}")
    with models.reading(name, where):
        images = _image_processor(name, where, revision)
        settings = ProcessorMixin.get_processor_dict(where, revision=revision)[0]
    template = settings.get("chat_template")
    if isinstance(template, dict):  # several templates by name
        template = template.get("default")
    token = config.image_token_id
    how = _grid(images) or _counted(name, images, tokenizer, config, settings)
    return Vision(
        processor=images, token=token, text=str(tokenizer.convert_ids_to_tokens(token)), template=template, **how
    )


def _grid(images: Any) -> dict[str, Any] | None:
    """Return {"count": function} if the image processor cuts an image into a grid of patches; otherwise return None.

    The function is the field `count` of `Vision`: it returns how many tokens an image has. A processor with a grid
    (Qwen2-VL and later) turns `merge_size` by `merge_size` patches into one token.
    """
    if "image_grid_thw" not in images.model_input_names:
        return None
    return {"count": lambda *size: images.get_number_of_image_patches(*size, {}) // images.merge_size**2}


def _counted(name: str, images: Any, tokenizer: Any, config: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields `count`, `around` and `options` of `Vision` for a processor whose class is in `COUNTED`.

    The function tries the processor on a test image. Raises UserError in these cases: the processor's class is not in
    `COUNTED`; for the test image, the number of tokens that the processor announces differs from the number that it
    writes; it writes no image tokens, or other tokens between them. Raises SetupError if its files lack a setting.
    """
    kind = settings.get("processor_class") or PROCESSOR_MAPPING_NAMES.get(config.model_type)
    what = f"model {quote(name)} (model type {quote(config.model_type)}): tasks cannot place its images in prompts"
    if kind not in COUNTED:
        raise UserError(
            f"{what}: its processor {quote(kind)} cuts no grid of patches and is none of {', '.join(COUNTED)}. "
            "Choose a model like Qwen3-VL or GLM-4V."
        )
    try:
        processor = without_videos(kind).from_args_and_dict(
            (), dict(settings), image_processor=images, tokenizer=tokenizer, video_processor=None
        )
        options = processor.valid_processor_kwargs._defaults.get("images_kwargs", {})
        import PIL.Image

        made = images(images=[PIL.Image.new("RGB", SAMPLE)], return_tensors="pt", **options)
        replaced = tokenizer(processor.replace_image_token(made, 0), add_special_tokens=False)["input_ids"]
        counted = _tokens(processor, 0, SAMPLE[1], SAMPLE[0])
    except (AttributeError, TypeError) as error:
        raise SetupError(
            f"{what}: its processor files lack a setting ({faults.first_line(error)}). Choose another model."
        ) from error
    places = [place for place, token in enumerate(replaced) if token == config.image_token_id]
    if not places or len(places) != places[-1] - places[0] + 1 or counted != len(replaced):
        raise UserError(
            f"{what}: for a test image its processor {quote(kind)} announces {counted} tokens and writes "
            f"{len(replaced)}. The numbers must be equal, and the image tokens must be successive. Choose another "
            "model."
        )
    before, after = tuple(replaced[: places[0]]), tuple(replaced[places[-1] + 1 :])
    count = partial(_tokens, processor, len(before) + len(after))
    return {"count": count, "options": options, "around": (before, after)}


def _tokens(processor: Any, around: int, height: int, width: int) -> int:
    """Return how many tokens stand for an image of this size. around: how many tokens the processor writes before and
    after an image. transformers counts them as tokens of the image, so this function subtracts them."""
    return int(processor._get_num_multimodal_tokens(image_sizes=[(height, width)]).num_image_tokens[0]) - around


def without_videos(kind: str) -> Any:
    """Return a subclass of the processor class named `kind`. The subclass needs no video processor, which would need
    torchvision."""
    return type(kind, (processor_class_from_name(kind),), {"check_argument_for_proper_class": lambda *_: None})


def _image_processor(name: str, where: str, revision: str | None) -> Any:
    # Not imported from the top level: there transformers 5.17 has this class only if torchvision is installed.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(where, revision=revision, backend="pil", trust_remote_code=False)
    except OSError as error:
        if "preprocessor_config.json" not in str(error):
            raise
        raise SetupError(
            f"model {quote(name)} has no preprocessor_config.json, which images need. Copy this file beside its "
            "weights, or choose another model."
        ) from None
