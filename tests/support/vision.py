"""Small random repositories of vision-language models, as they lie on the hub, and images for them.

The tokenizer is the built-in model's with Qwen's special tokens behind its vocabulary. An image of 32 by 32 pixels has
four tokens, because a token stands for 16 by 16 pixels.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import transformers

from kvbench import tiny
from kvbench.runner import image_processor
from kvbench.task import Image
from kvbench.taskkit.reader import ModelReader
from support import zoo

SPECIAL = {
    text: 492 + i
    for i, text in enumerate(
        ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    )
}
IMAGE_TOKEN = SPECIAL["<|image_pad|>"]
IMAGE_TOKENS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": SPECIAL["<|video_pad|>"],
    "vision_start_token_id": SPECIAL["<|vision_start|>"],
    "vision_end_token_id": SPECIAL["<|vision_end|>"],
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FIRST = (  # images before texts, contents as lists only: the form of LLaVA's templates
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for part in m.content | selectattr('type', 'equalto', 'image') %}<|image_pad|>\n{% endfor %}"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PATCH = 8  # pixels; four patches make one token
PREPROCESSOR = {
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 16 * 16, "longest_edge": 128 * 128},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # image processor, vision part
    "qwen3_vl": ("Qwen2VLImageProcessorFast", {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}),
    "qwen2_5_vl": ("Qwen2VLImageProcessor", {"fullatt_block_indexes": [1], "window_size": 32}),
    "glm4v": ("Glm4vImageProcessor", {"image_size": 64}),
    "internvl": ("GotOcr2ImageProcessorFast", {"image_size": [32, 32], "patch_size": [PATCH, PATCH]}),
    "llava": ("CLIPImageProcessor", {"image_size": 32}),
    "llava_onevision": ("LlavaOnevisionImageProcessor", {"image_size": 32}),
}
# Families whose images are squares of 32 by 32 pixels: more of the configuration, of the image processor, of the
# processor and of the tokenizer; the chat template.
SQUARES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any], str]] = {
    "internvl": (
        {"downsample_ratio": 0.5},
        {"size": {"height": 32, "width": 32}, "crop_to_patches": False, "min_patches": 1, "max_patches": 3},
        {"processor_class": "InternVLProcessor", "image_seq_length": 4},
        {
            "start_image_token": "<|vision_start|>",
            "end_image_token": "<|vision_end|>",
            "context_image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
        },
        TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>\n"),
    ),
    "llava": (
        {"vision_feature_select_strategy": "default", "vision_feature_layer": -2},
        {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
        {
            "processor_class": "LlavaProcessor",
            "image_token": "<|image_pad|>",
            "patch_size": PATCH,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
        {},
        FIRST,
    ),
    "llava_onevision": (
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
        | {"image_grid_pinpoints": [[32, 32], [32, 64], [64, 32], [64, 64]], "vision_aspect_ratio": "anyres_max_9"},
        {"size": {"height": 32, "width": 32}, "image_grid_pinpoints": [[32, 32], [32, 64], [64, 32], [64, 64]]},
        {
            "processor_class": "LlavaOnevisionProcessor",
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_9",
        },
        {},
        FIRST,
    ),
}


def config(family: str = "qwen3_vl", **text: Any) -> Any:
    """The configuration of a small model of one of `FAMILIES`. text: what differs in its text part."""
    if family in SQUARES:
        token = {"image_token_id" if family == "internvl" else "image_token_index": IMAGE_TOKEN}
        vision = {"patch_size": PATCH} | FAMILIES[family][1]
        return zoo.configuration(family, {"text_config": text, "vision_config": vision} | token | SQUARES[family][0])
    vision = {"patch_size": PATCH, "spatial_merge_size": 2, "depth": 2} | FAMILIES[family][1]
    return zoo.configuration(
        family, {"text_config": {"rope_parameters": ROPE} | text, "vision_config": vision, **IMAGE_TOKENS}
    )


def repository(folder: Path, family: str = "qwen3_vl", seed: int = 0, **text: Any) -> Path:
    """Configuration, random weights, tokenizer, chat template, image processor and generation configuration."""
    zoo.repository(folder, config(family, **text), seed)
    whole = json.loads((tiny.path() / "tokenizer.json").read_text(encoding="utf-8"))
    plain = whole["added_tokens"][0]
    whole["added_tokens"] += [plain | {"id": id_, "content": content} for content, id_ in SPECIAL.items()]
    (folder / "tokenizer.json").write_text(json.dumps(whole), encoding="utf-8")
    settings = json.loads((tiny.path() / "tokenizer_config.json").read_text(encoding="utf-8"))
    _, images, processor, tokens, template = SQUARES.get(family, ({}, PREPROCESSOR, {}, {}, TEMPLATE))
    settings |= {"chat_template": template, "eos_token": "<|im_end|>", "extra_special_tokens": tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "preprocessor_config.json").write_text(
        json.dumps(images | {"image_processor_type": FAMILIES[family][0]}), encoding="utf-8"
    )
    if processor:
        (folder / "processor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    transformers.GenerationConfig(
        eos_token_id=SPECIAL["<|im_end|>"], pad_token_id=257, do_sample=False
    ).save_pretrained(folder)
    return folder


def model_reader(folder: Path) -> ModelReader:
    """What renders prompts with images for the model in a folder."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    settings = transformers.AutoConfig.from_pretrained(folder)
    vision = image_processor.load("m", str(folder), None, settings, tokenizer)
    return ModelReader(tokenizer=tokenizer, model_type=settings.model_type, context=4096, chat=True, vision=vision)


def picture(name: str = "a.png", size: tuple[int, int] = (32, 32), seed: int = 0, kind: str = "PNG") -> Image:
    """A random image in memory. size: width and height in pixels."""
    import numpy as np
    import PIL.Image

    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(pixels).save(file, kind)
    return Image(name=name, data=file.getvalue())
