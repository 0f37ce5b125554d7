"""Finds the images of a batch of left-padded prompts by their image tokens, for `EvictionCache`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvbench.engine.images import PromptImages, image_tokens, rotary_axes
from kvbench.errors import UserError
from kvbench.eviction.api import Method
from kvbench.eviction.modality import check_images
from kvbench.records import Images
from kvbench.sources.refusals import check_images_of


@dataclass(frozen=True, slots=True)
class BatchImages:
    """The images of b prompts that are padded to t tokens.

    Attributes:
        rows: the images of each prompt; adjacent image tokens count as one image.
        axes: [3, b, t] rotary positions; None for model families that rotate by the token's index.
        deltas: [b, 1] rotary position of the token after each prompt, minus that token's index, counted without pads.
    """

    rows: list[PromptImages]
    axes: torch.Tensor | None
    deltas: torch.Tensor

    @classmethod
    def of(
        cls, model: Any, name: str, method: Method, inputs: Mapping[str, Any], pads: Sequence[int]
    ) -> BatchImages | None:
        """Return the images among a model's inputs; None without images.

        name: the method's name, for error messages. pads: number of pads before each prompt.

        Raises UserError for videos, and if the engine does not support images with this model or this method.
        """
        given = {key: value for key, value in inputs.items() if value is not None}
        kinds = given.get("mm_token_type_ids")  # [b, T]: 0 text, 1 image, 2 video; None: unknown
        if any("video" in key for key in given) or (kinds is not None and bool((kinds == 2).any())):
            raise UserError("EvictionCache does not read videos; give images.")
        if "pixel_values" not in given:
            return None
        check_images_of(model.config.to_dict())
        check_images(name, method)
        ids = given["input_ids"]
        shown = image_tokens(model, ids)
        turned = rotary_axes(model, ids, shown, given, given.get("attention_mask"))
        axes = turned[0] if turned else None
        rows = []
        for row, first in enumerate(pads):
            tokens = shown[row, first:]
            begins = tokens & ~torch.cat([tokens.new_zeros(1), tokens[:-1]])
            mine = None if axes is None else axes[:, row : row + 1, first:]
            spans = Images(spans=(), read=tuple)  # the caller gives the model its inputs
            rows.append(PromptImages(spans, (), mine, (begins.cumsum(0) * tokens).float()))
        deltas = [row.delta(len(row.modality)) for row in rows]
        return cls(rows, axes, torch.tensor(deltas, device=ids.device)[:, None])

    def modality(self, rows: Sequence[int]) -> torch.Tensor:
        """Return [b, 1, t]: 0 for each text token of b prompts, and the image's number, from 1, for each image token.

        rows: indices of these prompts in the batch. They must have equally many pads, because pads are left out.
        """
        return torch.stack([self.rows[row].modality for row in rows])[:, None]

    def positions(self, index: torch.Tensor, seen: int) -> torch.Tensor:
        """Return the rotary positions of t new tokens per sequence.

        Without `axes`, these are `index`. With `axes`, they are `axes` for the prompts, and `index` + `deltas` for
        later tokens. index: [b, t], the new tokens' indices in the text, without pads. seen: number of tokens before
        the new ones, pads included; 0: the new tokens are the prompts.
        """
        if self.axes is None:
            return index
        return index + self.deltas if seen else self.axes


def refuse_new_images(inputs: Mapping[str, Any]) -> None:
    """Raise UserError if the inputs of a forward pass after the prompt have images."""
    if inputs.get("pixel_values") is not None:
        raise UserError("EvictionCache reads images in the prompt only; make a new cache for a prompt with all images.")
