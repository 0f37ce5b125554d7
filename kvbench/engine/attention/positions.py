"""Check that a model uses the positions that the engine passes, rather than counting tokens in transformers' cache."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from kvbench.engine.attention.geometry import own_failures
from kvbench.engine.attention.interface import AttentionCall, route, run
from kvbench.engine.cache.recurrent import RecurrentStates, StateShape
from kvbench.errors import UserError, quote

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-3}  # relative to the largest number
TOKENS = 6


class _Stop(BaseException):
    """Ends a forward pass early. No Exception, so that `except Exception` in the model's code does not catch it."""


@torch.no_grad()
def check_positions(model: Any, states: Sequence[StateShape] = ()) -> None:
    """Check that a token has the same queries when the model reads it alone as when it reads it after other tokens.

    In both passes the token is at the same position; alone it continues the states that the tokens before it left. Only
    the layers up to the first attention run. Raises UserError for a model that ignores the positions it is given, or
    mixes neighbouring tokens outside attention and these states.

    states: of layers beside attention; empty if the model has none.
    """
    ids = torch.arange(1, TOKENS + 1, device=next(model.parameters()).device)[None]
    before = RecurrentStates.like(states)
    together = first_queries(model, ids, None, RecurrentStates.like(states))[:, :, -1:].float()
    first_queries(model, ids[:, :-1], 0, before)
    alone = first_queries(model, ids[:, -1:], TOKENS - 1, before).float()
    error = (together - alone).abs().max() / together.abs().max().clamp(min=1e-12)
    if not float(error) < TOLERANCE.get(next(model.parameters()).dtype, 1e-3):
        raise UserError(
            f"model type {quote(model.config.model_type)} is not supported: the queries of a token at a given position "
            "change when the model reads it without the tokens before it."
        )


def first_queries(
    model: Any, ids: torch.Tensor, position: int | None, states: RecurrentStates | None = None
) -> torch.Tensor:
    """Return the first attention layer's queries [b, Hq, t, D] after RoPE.

    position: that of the first token; None: the model chooses the positions. states: of layers beside attention, which
    the pass continues and replaces.
    """
    queries: list[torch.Tensor] = []

    def record(call: AttentionCall) -> torch.Tensor:
        queries.append(call.query)
        raise _Stop

    at = {} if position is None else {"position_ids": torch.arange(ids.shape[1], device=ids.device)[None] + position}
    with route(model, record), own_failures(model), contextlib.suppress(_Stop):
        run(model, states, input_ids=ids, **at)
    return queries[0]
