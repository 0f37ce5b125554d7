"""Small random models that see, and prompts with random images for them."""

from __future__ import annotations

import torch

from kvbench.engine.images import joined
from kvbench.engine.model.load import prepare
from kvbench.records import Images, Request, Sampling
from support import zoo
from support.families import HALF_MROPE, MROPE
from support.models import Words

TOKENS = {"image_token_id": 500, "vision_start_token_id": 501, "vision_end_token_id": 502, "video_token_id": 503}
GLM = {"image_token_id": 500, "image_start_token_id": 501, "image_end_token_id": 502, "video_token_id": 503}
GLM |= {"video_start_token_id": 504, "video_end_token_id": 505}
PATCHES = {"vision_config": {"patch_size": 2, "in_channels": 3}}
SQUARE = {"vision_config": {"image_size": 8, "patch_size": 2}}
PARTIAL = {"text_config": {"rope_parameters": MROPE["text_config"]["rope_parameters"] | {"partial_rotary_factor": 1.0}}}
FAMILIES = {
    "glm4v": MROPE | GLM | PATCHES,
    "glm4v_moe": HALF_MROPE | GLM | PATCHES,
    "internvl": {"image_token_id": 500, "vision_config": {"image_size": [8, 8], "patch_size": [2, 2]}},
    "llava": SQUARE | {"image_token_index": 500},
    "llava_onevision": SQUARE | {"image_token_index": 500, "video_token_index": 503, "image_grid_pinpoints": [[16, 8]]},
    "qwen2_5_vl": MROPE | TOKENS | PATCHES,
    "qwen2_vl": MROPE | TOKENS | PATCHES,
    "qwen3_5": PARTIAL | TOKENS | PATCHES,
    "qwen3_5_moe": PARTIAL | TOKENS | PATCHES,
    "qwen3_vl": MROPE | TOKENS | PATCHES,
    "qwen3_vl_moe": MROPE | TOKENS | PATCHES,
}
SMALL, WIDE, LARGE = (1, 4, 4), (1, 4, 8), (1, 8, 8)  # 4, 8 and 16 tokens where a family has grids


def load(model_type, scale=0.5):
    config = zoo.configuration(model_type, FAMILIES[model_type])
    model = zoo.build(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    return prepare(model, Words())


def picture(loaded, grid, draw):
    """What the model reads of a random image besides its tokens, and their number."""
    config = loaded.model.config
    vision = config.vision_config
    if hasattr(vision, "temporal_patch_size"):
        size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        tokens = grid[0] * grid[1] * grid[2] // 4
        read = {"pixel_values": torch.randn(4 * tokens, size, generator=draw), "image_grid_thw": torch.tensor([grid])}
        return read, tokens
    if config.model_type == "llava_onevision":  # the image in small, and its two halves
        read = {"pixel_values": torch.randn(1, 3, 3, 8, 8, generator=draw), "image_sizes": torch.tensor([[16, 8]])}
    else:
        read = {"pixel_values": torch.randn(1, 3, 8, 8, generator=draw)}
    with torch.no_grad():
        return read, sum(len(features) for features in loaded.model.get_image_features(**read).pooler_output)


def ask(loaded, doc, texts, grids, new_tokens, samples=1, **more):
    """A request whose prompt is texts[0], an image, texts[1], an image ...; `texts` are numbers of tokens."""
    draw = torch.Generator().manual_seed(10 * doc + 1)
    pictures = [picture(loaded, grid, draw) for grid in grids]
    ids, spans = [], []
    for i, count in enumerate(texts):
        ids += torch.randint(3, 250, (count,), generator=draw).tolist()
        if i < len(grids):
            tokens = pictures[i][1]
            spans.append((len(ids) + 1, len(ids) + 1 + tokens))
            ids += [501, *[500] * tokens, 502]
    images = Images(
        spans=tuple(spans),
        read=lambda: [read for read, _ in pictures],
    )
    return Request(
        task="t",
        doc_id=str(doc),
        prompt_ids=tuple(ids),
        samples=tuple(range(samples)),
        max_new_tokens=new_tokens,
        images=images if grids else None,
        **{"sampling": Sampling(temperature=1.0)} | more,
    )


def mixed(loaded, **more):
    """Prompts with several images, with one, and without."""
    return [
        ask(loaded, 1, (5, 7, 4), (LARGE, WIDE), 30, **more),
        ask(loaded, 2, (20,), (), 25, **more),
        ask(loaded, 3, (3, 12), (SMALL,), 40, **more),
        ask(loaded, 4, (2, 3, 3, 20), (WIDE, SMALL, LARGE), 15, **more),
    ]


def generated(loaded, request, **more):
    ids = torch.tensor([request.prompt_ids])
    given = joined(request.images.read()) if request.images else {}
    if "image_grid_thw" in given:
        given |= {"mm_token_type_ids": (ids == 500).int()}
    mask, length = torch.ones_like(ids), request.max_new_tokens
    out = loaded.model.generate(ids, attention_mask=mask, max_new_tokens=length, do_sample=False, **given, **more)
    return out[0, ids.shape[1] :].tolist()
