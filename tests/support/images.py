"""Small random models that see, and prompts with random images for them."""

from __future__ import annotations

import torch

from kvbench.engine.model.load import prepare
from kvbench.records import Images, Request, Sampling
from support import zoo
from support.families import MROPE
from support.models import Words

TOKENS = {"image_token_id": 500, "vision_start_token_id": 501, "vision_end_token_id": 502, "video_token_id": 503}
PATCH = {"patch_size": 2, "in_channels": 3}
SMALL, WIDE, LARGE = (1, 4, 4), (1, 4, 8), (1, 8, 8)  # 4, 8 and 16 tokens


def load(model_type, scale=0.7):
    config = zoo.configuration(model_type, MROPE | TOKENS | {"vision_config": PATCH})
    model = zoo.build(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    # Random models draw these too, and the reference would take them for images.
    model.lm_head.register_buffer("special", torch.tensor(sorted(TOKENS.values())), persistent=False)
    model.lm_head.register_forward_hook(lambda head, args, out: out.index_fill(-1, head.special, -30.0))
    return prepare(model, Words())


def pixels(loaded, grids, seed):
    """Random pixel values and grids of several images."""
    vision = loaded.model.config.vision_config
    size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    made = torch.Generator().manual_seed(seed)
    parts = [torch.randn(t * h * w, size, generator=made) for t, h, w in grids]
    return parts, torch.tensor(grids)


def ask(loaded, doc, texts, grids, new_tokens, samples=1, **more):
    """A request whose prompt is texts[0], an image, texts[1], an image ...; `texts` are numbers of tokens."""
    draw = torch.Generator().manual_seed(10 * doc + 1)
    parts, sizes = pixels(loaded, grids, doc)
    ids, spans = [], []
    for i, count in enumerate(texts):
        ids += torch.randint(3, 250, (count,), generator=draw).tolist()
        if i < len(grids):
            tokens = grids[i][0] * grids[i][1] * grids[i][2] // 4
            spans.append((len(ids) + 1, len(ids) + 1 + tokens))
            ids += [501, *[500] * tokens, 502]
    images = Images(
        spans=tuple(spans),
        inputs=lambda some: {
            "pixel_values": torch.cat([parts[i] for i in some]),
            "image_grid_thw": sizes[some.start : some.stop],
        },
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
    count = len(request.images.spans) if request.images else 0
    given = request.images.inputs(range(count)) | {"mm_token_type_ids": (ids == 500).int()} if count else {}
    mask, length = torch.ones_like(ids), request.max_new_tokens
    out = loaded.model.generate(ids, attention_mask=mask, max_new_tokens=length, do_sample=False, **given, **more)
    return out[0, ids.shape[1] :].tolist()
