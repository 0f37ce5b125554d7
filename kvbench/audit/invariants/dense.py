"""Runs a whole sequence through the model at once, without a cache; returns its logits and every layer's queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from kvbench.engine import reference
from kvbench.engine.attention.interface import AttentionCall, Handler
from kvbench.engine.attention.latent import Latents, projections
from kvbench.engine.model.load import LoadedModel
from kvbench.engine.reference import KeptHistory
from kvbench.records import Images


@dataclass(frozen=True, slots=True)
class Pass:
    """The result of a forward pass over T tokens, run without a cache."""

    logits: torch.Tensor  # [T, V]
    queries: dict[int, torch.Tensor]  # of each layer, [Hq, T, D] post-RoPE, as the engine stores them


def dense_pass(
    loaded: LoadedModel,
    ids: Sequence[int],
    history: KeptHistory,
    keys: Sequence[int],
    images: Images | None,
) -> Pass:
    """Run a whole sequence without a cache (`reference.dense_logits`), and record the queries of every layer.

    history: the log of evictions; a mask hides the evicted entries. keys: the names under which the log lists the
    evictions of the prompt and of the sample. images: the images of the prompt with which `ids` begins.
    """
    queries: dict[int, torch.Tensor] = {}
    route, expanding = reference.route, projections(loaded.model)
    ranks, latents = {g.index: g.latent for g in loaded.geometry}, Latents()

    def routed(model: Any, handler: Handler) -> Any:
        def recorded(call: AttentionCall) -> torch.Tensor:
            query = call.query
            if rank := ranks.get(call.layer):  # the pass attends to expanded heads
                query = latents.of(expanding[call.layer], rank, call.key, call.value).queries(query)
            queries[call.layer] = query[0].clone()
            return handler(call)

        return route(model, recorded)

    with patch.object(reference, "route", routed):
        return Pass(reference.dense_logits(loaded, ids, history, keys, images), queries)
