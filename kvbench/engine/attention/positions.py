"""Whether a model places tokens where the engine says: positions are handed to it, and never follow from a cache."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from kvbench.engine.attention.geometry import own_failures
from kvbench.engine.attention.interface import AttentionCall, route, run
from kvbench.errors import UserError, quote

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-3}  # of the largest number
TOKENS = 6


class _Stop(BaseException):
    """Ends a forward pass of which no more is wanted. No error, so that no handler of errors keeps it."""


@torch.no_grad()
def check_positions(model: Any) -> None:
    """The last of a few tokens, read alone at its position, must have the queries that it has among the others.

    Only the first layer runs. Raises UserError for a model that counts positions its own way, or mixes neighbouring
    tokens outside attention.
    """
    ids = torch.arange(1, TOKENS + 1, device=next(model.parameters()).device)[None]
    together = first_queries(model, ids, None)[:, :, -1:].float()
    alone = first_queries(model, ids[:, -1:], TOKENS - 1).float()
    error = (together - alone).abs().max() / together.abs().max().clamp(min=1e-12)
    if not float(error) < TOLERANCE.get(next(model.parameters()).dtype, 1e-3):
        raise UserError(
            f"model type {quote(model.config.model_type)} is not supported: a token at a given position is read "
            "otherwise alone than among its neighbours."
        )


def first_queries(model: Any, ids: torch.Tensor, position: int | None) -> torch.Tensor:
    """[b, Hq, t, D] queries of the first attention layer after its rotation.

    position: of the first token; None: the model's own positions.
    """
    queries: list[torch.Tensor] = []

    def record(call: AttentionCall) -> torch.Tensor:
        queries.append(call.query)
        raise _Stop

    at = {} if position is None else {"position_ids": torch.arange(ids.shape[1], device=ids.device)[None] + position}
    with route(model, record), own_failures(model), contextlib.suppress(_Stop):
        run(model, input_ids=ids, **at)
    return queries[0]
