"""A model's RoPE as a tensor operation, read from the model's frequencies and checked against the model's queries."""

from __future__ import annotations

from typing import Any

import torch

from kvbench.engine.attention.positions import TOLERANCE, first_queries
from kvbench.errors import UserError, quote
from kvbench.eviction.rope import Rope


@torch.no_grad()
def read_rope(model: Any) -> Rope:
    """Return the model's RoPE in the layers that methods evict.

    The model reads one token at two positions. The token's queries in the first layer must differ by exactly this
    rotation, so the frequencies and the pairing of dimensions are never guessed. Raises UserError when no known
    rotation explains the difference.
    """
    token = torch.ones(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    near, far = (first_queries(model, token, position) for position in (3, 40))
    distance = torch.tensor([37], device=near.device)
    for frequencies in _frequencies(model):
        for interleaved in (False, True):
            if 2 * frequencies.numel() > near.shape[-1]:
                continue
            rope = Rope(frequencies, interleaved)
            error = (rope.rotate(near, distance) - far.float()).abs().max() / far.float().abs().max()
            if float(error) < TOLERANCE.get(far.dtype, 1e-3):
                return rope
    raise UserError(
        f"the rotary positions of {quote(type(model).__name__)} are of a kind that this method cannot undo; "
        "use another method."
    )


def _frequencies(model: Any) -> list[torch.Tensor]:
    """Return every buffer of the model that has transformers' name for RoPE frequencies."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    return [buffers[name].float() for name in sorted(buffers)]
