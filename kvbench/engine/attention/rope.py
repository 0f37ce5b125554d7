"""A model's RoPE as a tensor operation, read from the model's frequencies and checked against the model's queries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from kvbench.engine.attention.geometry import LayerGeometry, own_failures
from kvbench.engine.attention.interface import AttentionCall, route, run
from kvbench.engine.attention.positions import TOLERANCE
from kvbench.errors import UserError, quote
from kvbench.eviction.rope import Rope


@torch.no_grad()
def read_rope(model: Any, geometry: Sequence[LayerGeometry]) -> Rope:
    """Return the model's RoPE in the layers that methods evict.

    Tries rotations with the model's own frequencies, in two pairings of dimensions. The model reads one token at two
    positions. The right rotation turns the token's queries at one position into those at the other, up to rounding, in
    each layer that methods evict. Raises UserError when no rotation does so.

    geometry: the cache's geometry, which tells which layers methods evict. Sliding-window layers are left out because
    they may have other frequencies.
    """
    near, far = (_queries(model, position) for position in (3, 40))
    evicted = [g.index for g in geometry if g.evicts]
    for rope in _candidates(model):
        if all(_explains(rope, near[layer], far[layer], 40 - 3) for layer in evicted):
            return rope
    raise UserError(
        f"this method must undo RoPE, but the RoPE frequencies of {quote(type(model).__name__)} are of an unknown kind "
        "or differ between the layers that it evicts. Use another method."
    )


def _queries(model: Any, position: int) -> dict[int, torch.Tensor]:
    """Return each layer's queries [1, Hq, 1, D], after RoPE, of one token at a position."""
    queries: dict[int, torch.Tensor] = {}

    def attend(call: AttentionCall) -> torch.Tensor:
        queries[call.layer] = call.query
        group = call.query.shape[1] // call.value.shape[1]
        return call.value.repeat_interleave(group, dim=1).transpose(1, 2)  # a token alone attends to itself

    token = torch.ones(1, 1, dtype=torch.long, device=next(model.parameters()).device)
    with route(model, attend), own_failures(model):
        run(model, input_ids=token, position_ids=token * position)
    return queries


def _explains(rope: Rope, near: torch.Tensor, far: torch.Tensor, distance: int) -> bool:
    """Return whether the RoPE over `distance` positions turns the queries `near` into `far`."""
    if 2 * rope.frequencies.numel() > near.shape[-1]:
        return False
    turned = rope.rotate(near, torch.tensor([distance], device=near.device))
    error = (turned - far.float()).abs().max() / far.float().abs().max()
    return float(error) < TOLERANCE.get(far.dtype, 1e-3)


def _candidates(model: Any) -> Iterator[Rope]:
    """Yield two RoPEs, one with each pairing of dimensions, for every buffer that has transformers' name for RoPE
    frequencies."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    for name in sorted(buffers):
        yield from (Rope(buffers[name].float(), interleaved) for interleaved in (False, True))
