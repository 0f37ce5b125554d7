"""Checks, in short forward passes, that a loaded model works under the engine.

- The model uses the positions that the engine passes, rather than counting tokens in transformers' cache.
- When a text is read in several passes, recurrent layers continue from the state after the previous pass.
- Latent layers give the same outputs from latents as from the keys and values of all heads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from kvbench.engine.attention.geometry import own_failures
from kvbench.engine.attention.grouped import causal_bias
from kvbench.engine.attention.interface import AttentionCall, route, run, text_model
from kvbench.engine.cache.recurrent import RecurrentStates, StateShape
from kvbench.errors import UserError, quote

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-3}  # relative to the largest number
TOKENS = 6
TABLES = frozenset({"wpe", "embed_positions", "position_embeddings"})  # modules or buffers with a row per position


class _Stop(BaseException):
    """Ends a forward pass early. It is a BaseException, so that `except Exception` in the model's code does not catch
    it."""


def has_position_table(model: Any) -> bool:
    """Return whether the model looks its positions up in a table, so that it fails at positions behind its context."""
    text = text_model(model)
    names = (name for name, _ in (*text.named_parameters(), *text.named_buffers()))
    return any(TABLES.intersection(name.split(".")) for name in names)


@torch.no_grad()
def check_positions(model: Any) -> None:
    """Check that the model computes equal queries for a token read alone and for this token read after other tokens.

    In both passes the token is at the same position. A pass ends at the first attention layer. Raises UserError
    for a model that ignores the positions that the engine passes, or mixes neighbouring tokens outside attention.
    """
    ids = torch.arange(1, TOKENS + 1, device=next(model.parameters()).device)[None]
    together = _first_queries(model, input_ids=ids)[:, :, -1:].float()
    last = ids[:, -1:]
    alone = _first_queries(model, input_ids=last, position_ids=torch.full_like(last, TOKENS - 1)).float()
    if _differ(together, alone, model):
        raise UserError(
            f"model type {quote(model.config.model_type)} is not supported: the queries of a token at a given position "
            "change when the model reads it without the tokens before it. Choose another model."
        )


@torch.no_grad()
def check_states(model: Any, states: Sequence[StateShape]) -> None:
    """Check that a model continues the states of its layers, and uses the positions that the engine passes.

    The last token of a text must have the same queries and logits whether the text is read in three passes or in one.
    Attention is switched off (its output is zero), so only the states carry anything from pass to pass. Raises
    UserError for a model that begins new states in each pass or ignores the positions.
    """
    ids = torch.arange(1, TOKENS + 1, device=next(model.parameters()).device)[None]
    queries: list[torch.Tensor] = []

    def nothing(call: AttentionCall) -> torch.Tensor:
        b, heads, t, _ = call.query.shape
        queries.append(call.query[:, :, -1].float())
        return call.value.new_zeros(b, t, heads, call.value.shape[-1])

    def read(start: int, end: int, continued: RecurrentStates | None) -> list[torch.Tensor]:
        queries.clear()
        at = None if continued is None else torch.arange(start, end, device=ids.device)[None]
        return [run(model, continued, input_ids=ids[:, start:end], position_ids=at).logits[:, -1].float(), *queries]

    with route(model, nothing), own_failures(model):
        whole, pieces = read(0, TOKENS, None), RecurrentStates.like(states)
        for start, end in ((0, 2), (2, TOKENS - 1), (TOKENS - 1, TOKENS)):
            last = read(start, end, pieces)
    if any(_differ(*both, model) for both in zip(whole, last, strict=True)):
        raise UserError(
            f"model type {quote(model.config.model_type)} is not supported: when it reads a text in several passes, "
            "its layers do not continue their state, or it ignores the positions that it gets. Choose another model."
        )


@torch.no_grad()
def check_latents(model: Any) -> None:
    """Check that attention over latents equals attention over the keys and values of all heads, in every latent layer.

    The model reads a few tokens once in each of these two forms. All attention layers output zeros, so that every layer
    gets equal inputs both times. Raises UserError if the attention of a layer differs between the forms, for example
    because the module that computes keys from latents has a bias.
    """
    ids = torch.arange(1, TOKENS + 1, device=next(model.parameters()).device)[None]
    grid = torch.arange(TOKENS, device=ids.device)

    def outputs(latent: bool) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []

        def attend(call: AttentionCall) -> torch.Tensor:
            at = grid.to(call.query.device)
            mask = causal_bias(at, at, call.window, call.query.dtype)[None, None]
            call = replace(call, indexer=None)  # it chooses the same entries in both forms
            out = call.attend(call.query, call.key, call.value, mask)
            found.append((out if call.latent is None else call.latent.outputs(out)).float())
            return torch.zeros_like(out)

        with route(model, attend, latent=latent), own_failures(model):
            run(model, input_ids=ids, position_ids=grid[None])
        return found

    if any(_differ(*both, model) for both in zip(outputs(latent=False), outputs(latent=True), strict=True)):
        raise UserError(
            f"model type {quote(model.config.model_type)} is not supported: its latent attention expands latents in a "
            "way that kvbench does not support. Choose another model."
        )


def _differ(a: torch.Tensor, b: torch.Tensor, model: Any) -> bool:
    error = (a - b).abs().max() / a.abs().max().clamp(min=1e-12)
    return not float(error) < TOLERANCE.get(next(model.parameters()).dtype, 1e-3)


def _first_queries(model: Any, **inputs: Any) -> torch.Tensor:
    """Return the first attention layer's queries [b, Hq, t, D] after RoPE."""
    queries: list[torch.Tensor] = []

    def record(call: AttentionCall) -> torch.Tensor:
        queries.append(call.query)
        raise _Stop

    with route(model, record), own_failures(model), contextlib.suppress(_Stop):
        run(model, **inputs)
    return queries[0]
