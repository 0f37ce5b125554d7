"""The images of a prompt, as the model reads them: inputs beside token ids, and the rotary positions of the tokens.

For methods, masks, windows and columns, a token's position is its index in the sequence. RoPE may use other positions:
some model families rotate image tokens by rotary positions with three axes (time, height, width). In these families a
token after the prompt has the rotary position index + delta on every axis; delta is one number per prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvbench.errors import UserError
from kvbench.records import Images
from kvbench.sources.refusals import check_images_of


@dataclass(frozen=True, slots=True)
class PromptImages:
    """The images of one prompt of T tokens.

    Attributes:
        read: for each image, the model's inputs besides token ids, computed once for all passes.
        axes: [3, 1, T] rotary positions of the prompt's tokens; None for model families whose RoPE uses the index.
        modality: [T] float32, 0 for text, else the number of the token's image, from 1.
    """

    images: Images
    read: Sequence[Mapping[str, Any]]
    axes: torch.Tensor | None
    modality: torch.Tensor

    @classmethod
    def of(cls, model: Any, ids: Sequence[int], images: Images) -> PromptImages:
        """Return the images of the prompt with the token ids `ids`, with the model's inputs for each image.

        Raises UserError in three cases: the engine does not support images for this model; the prompt's text, outside
        the images, holds the model's image token; `rotary_axes` raises a UserError.
        """
        check_images_of(model.config.to_dict())
        device = next(model.parameters()).device
        modality = torch.zeros(len(ids), device=device)
        for number, (first, last) in enumerate(images.spans, start=1):
            modality[first:last] = number
        tokens = torch.tensor([list(ids)], device=device)
        if bool((modality[None].eq(0) & image_tokens(model, tokens)).any()):
            raise UserError(
                "a prompt's text holds the model's image token, which stands for images. Remove it from the text."
            )
        read = images.read()
        turned = rotary_axes(model, tokens, modality[None] > 0, joined(read))
        return cls(images, read, turned[0] if turned else None, modality)

    def delta(self, tokens: int) -> int:
        """Return the rotary position minus the index, for the token after the first `tokens` tokens of the prompt."""
        return 0 if self.axes is None else int(self.axes[..., :tokens].max()) + 1 - tokens

    def border(self, first: int, last: int) -> int:
        """Return the token before which a pass from token `first` must end, so that the pass splits no image.

        This is `last` unless `last` lies within an image. Then the pass ends before the image or, if the pass begins
        with the image, after it.
        """
        for start, end in self.images.spans:
            if start < last < end:
                return start if start > first else end
        return last

    def inputs(self, model: Any, first: int, last: int) -> dict[str, torch.Tensor]:
        """Return the model's inputs besides token ids for the tokens from `first` up to `last`, exclusive. Raises
        ValueError if an image lies only partly among these tokens."""
        inside = [i for i, (start, end) in enumerate(self.images.spans) if first < end and start < last]
        if any(self.images.spans[i][0] < first or self.images.spans[i][1] > last for i in inside):
            raise ValueError(f"the prompt's tokens from {first} up to {last}, exclusive, hold only a part of an image")
        given = joined([self.read[i] for i in inside])
        made = {name: on_device(model, value) for name, value in given.items()}
        return made if self.axes is None else made | {"position_ids": self._rotary(self.axes, first, last)}

    def modality_of(self, first: int, last: int) -> torch.Tensor:
        """Return the modality of the tokens from `first` up to `last`, exclusive; tokens after the prompt are text."""
        known = self.modality[first:last]
        return torch.nn.functional.pad(known, (0, last - first - len(known)))

    def _rotary(self, axes: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Return the rotary positions [3, 1, t] of the t tokens from `first` up to `last`, exclusive. Some of the
        tokens may come after the prompt."""
        length = axes.shape[-1]
        later = torch.arange(max(first, length), max(last, length), device=axes.device) + self.delta(length)
        return torch.cat([axes[..., first:last], later.expand(3, 1, -1)], dim=-1)


def joined(read: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Concatenate the model's inputs for single images to its inputs for all images; {} without images."""
    return {name: torch.cat([one[name] for one in read]) for name in (read[0] if read else ())}


def kept_shares(held: Sequence[torch.Tensor], spans: Sequence[tuple[int, int]], seen: int) -> tuple[float, float]:
    """Return the share of text tokens, and the share of image tokens, that still have an entry; each a mean over heads.

    held: for each head of all evicted layers, the positions of its entries. spans: for each image, its first position
    and its last position + 1. seen: number of tokens read.
    """
    shown, every = sum(end - start for start, end in spans), torch.cat([p.to(held[0].device) for p in held])
    inside = int(sum(((every >= start) & (every < end)).sum() for start, end in spans))
    return (len(every) - inside) / len(held) / (seen - shown), inside / len(held) / shown


def image_tokens(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return which of the tokens [b, T] stand for images, [b, T] bool."""
    names = (getattr(model.config, name, None) for name in ("image_token_id", "image_token_index"))
    return ids == next(token for token in names if token is not None)


def rotary_axes(
    model: Any, ids: torch.Tensor, shown: torch.Tensor, inputs: Mapping[str, Any], mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the rotary positions [3, b, T] of prompts with images, and the delta [b] of each prompt.

    delta: rotary position minus index of a token after the prompt. Both results come from the model's function
    `get_rope_index`; None for a model without this function, whose RoPE uses the index. shown: [b, T] bool, the tokens
    that stand for images; inputs: the model's inputs for the images; mask: [b, T], 0 for pads.
    Raises UserError if the model has this function and `inputs` lack `image_grid_thw`.
    """
    inner = getattr(model, "model", model)
    if not hasattr(inner, "get_rope_index"):
        return None
    if inputs.get("image_grid_thw") is None:
        raise UserError(
            "the model rotates image tokens by three axes and needs image_grid_thw for this. "
            "Pass it, as the model's processor returns it."
        )
    grids = {name: value.cpu() for name, value in inputs.items() if name.endswith("_grid_thw")}
    where, mask = ids.device, None if mask is None else mask.cpu()  # on the CPU: the function reads single numbers
    axes, deltas = inner.get_rope_index(ids.cpu(), mm_token_type_ids=shown.cpu().int(), attention_mask=mask, **grids)
    return axes.to(where), deltas.flatten().to(where)


def on_device(model: Any, value: Any) -> Any:
    """Return a tensor on the model's device, floats also in the model's dtype; return any other value unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    parameter = next(model.parameters())
    return value.to(parameter.device, parameter.dtype if value.is_floating_point() else None)
