"""A model's RoPE as a tensor operation, read from its frequencies and proved on the model itself."""

from __future__ import annotations

from typing import Any

import torch

from kvbench.engine.attention import AttentionCall, route
from kvbench.errors import UserError, show
from kvbench.eviction.rope import Rope

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-3}


@torch.no_grad()
def read_rope(model: Any) -> Rope:
    """The rotation of a model's evicting layers.

    One token is run at two positions. Its queries in the first layer must differ by exactly this rotation, or the
    model is refused: pairing of dimensions and frequencies are never guessed.

    Raises:
        UserError: the model has no RoPE that is known here.
    """
    near, far = _first_queries(model, 3), _first_queries(model, 40)
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
        f"the rotary positions of {show(type(model).__name__)} are of a kind that this method cannot undo; "
        "use another method."
    )


def _first_queries(model: Any, position: int) -> torch.Tensor:
    """[1, Hq, 1, D] post-RoPE queries of the first layer for token 1 at a position."""
    found: list[torch.Tensor] = []

    def record(call: AttentionCall) -> torch.Tensor:
        if not found:
            found.append(call.query)
        b, hq, t, _ = call.query.shape
        return call.value.new_zeros(b, t, hq, call.value.shape[-1])

    device = next(model.parameters()).device
    with route(model, record):
        model(
            input_ids=torch.ones(1, 1, dtype=torch.long, device=device),
            position_ids=torch.full((1, 1), position, device=device),
            attention_mask=None,
            past_key_values=None,
            use_cache=False,
        )
    return found[0]


def _frequencies(model: Any) -> list[torch.Tensor]:
    """Candidates: every buffer of the model that is named as transformers names RoPE's frequencies."""
    found = {name: buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    return [found[name].float() for name in sorted(found)]
