"""The prompts of an audit: random tokens and, for a model that reads images, random images between them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvbench.engine.images import joined
from kvbench.records import Images, Request
from kvbench.sources.refusals import WITH_IMAGES

GRIDS = ((2, 2), (2, 4), (4, 4))  # rows and columns of an image's tokens: sizes of successive images
TEXT = 3  # tokens of text before each image
ENDING = 8  # tokens of text, at least, at the end of a prompt
WITHOUT = 3  # every third prompt has no image


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the images that some of them stand for."""

    ids: tuple[int, ...]
    images: Images | None = None


def random_prompts(model: Any, lengths: Sequence[int], seed: int) -> list[Prompt]:
    """Return a random prompt of each length. If the model reads images as grids of patches, two of three prompts have
    images."""
    draw, config = torch.Generator().manual_seed(seed), model.config
    vocabulary = model.get_input_embeddings().weight.shape[0]
    texts = [torch.randint(0, vocabulary, (length,), generator=draw) for length in lengths]
    # Families without these settings, such as LLaVA, cut images in other ways.
    if config.model_type not in WITH_IMAGES or not hasattr(config.vision_config, "temporal_patch_size"):
        return [Prompt(tuple(ids.tolist())) for ids in texts]
    texts = [torch.where(ids == config.image_token_id, 0, ids) for ids in texts]
    return [
        Prompt(tuple(ids.tolist())) if number % WITHOUT == 0 else _with_images(config, ids, draw)
        for number, ids in enumerate(texts, start=1)
    ]


def generate_inputs(requests: Sequence[Request], device: torch.device) -> dict[str, torch.Tensor]:
    """Return the inputs of `model.generate` for requests with equally long prompts, as a processor returns them."""
    ids = torch.tensor([list(request.prompt_ids) for request in requests], device=device)
    inputs, shown = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, torch.zeros_like(ids)
    images = [(row, request.images) for row, request in enumerate(requests) if request.images]
    if not images:
        return inputs
    for row, some in images:
        for first, last in some.spans:
            shown[row, first:last] = 1
    read = [image for _, some in images for image in some.read()]
    return inputs | {"mm_token_type_ids": shown} | joined(read)


def _with_images(config: Any, ids: torch.Tensor, draw: torch.Generator) -> Prompt:
    """Return a prompt whose image tokens replace some of `ids` [T]."""
    vision, ids = config.vision_config, ids.clone()
    spans, read = [], list[Mapping[str, torch.Tensor]]()
    for first, last, (rows, columns) in _places(len(ids)):
        ids[first:last] = config.image_token_id
        spans.append((first, last))
        patches = torch.tensor([[1, rows, columns]]) * torch.tensor([1, *[vision.spatial_merge_size] * 2])
        size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        pixels = torch.randn(int(patches.prod()), size, generator=draw)  # [patches, numbers of a patch]
        read.append({"pixel_values": pixels, "image_grid_thw": patches})
    return Prompt(tuple(ids.tolist()), Images(spans=tuple(spans), read=lambda: read))


def _places(length: int) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """Yield the place of each image that fits into a prompt of `length` tokens. A place is (position of the image's
    first token, position after its last token, (rows, columns) of its grid)."""
    end = 0
    for rows, columns in itertools.cycle(GRIDS):
        first = end + TEXT
        end = first + rows * columns
        if end > length - ENDING:
            return
        yield first, end, (rows, columns)
