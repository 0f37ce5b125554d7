"""Trains `kvzap`: a small network per layer learns to predict the scores that `kvzip` gives to a token's entries.

The frozen model reads a text, kvzip's request to repeat it, and the text again, as in `methods/kvzip.py`. The network
learns to predict, for the entry of token j:

    target_j = log max over t, h of a_htj |W_O^h v_j| / |x_t|          (KVzip+, arXiv 2601.07891)

t are the queries of the repetition, and h the query heads of the KV head's group. a is causal attention over all tokens
read, v_j the token's value, W_O^h the head's part of the output projection, and x_t the input of the layer's attention.
The option `target=kvzip` leaves out both norms. The loss is the mean square error over the text's tokens, the KV heads,
and the layers from which methods evict entries. A text is a prompt and its answer, cut after `tokens` tokens.

Letters of shapes: Hq query heads, Hk KV heads, g query heads of a KV head's group, n tokens, dv size of a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch

from kvbench import registry
from kvbench.engine.adapter import projections
from kvbench.engine.attention.interface import AttentionCall
from kvbench.engine.model.load import LoadedModel
from kvbench.engine.model.weights import model_fields
from kvbench.engine.probes import Drafts, ReadPrompt
from kvbench.errors import UserError
from kvbench.eviction.learned import Shapes
from kvbench.eviction.new_tokens import NewTokens
from kvbench.eviction.terms.surrogate import log_worth, surrogate_shapes
from kvbench.eviction.terms.window_attention import window_attention
from kvbench.train.predictors import PredictorRecipe
from kvbench.train.recipe import check_choices, check_least
from kvbench.train.traces import Trace

BLOCK = 256  # queries per attention call
LEAST = 1e-12  # smaller values are raised to this before the logarithm
TARGETS = ("kvzip+", "kvzip")


class ZapRecipe(PredictorRecipe):
    """Trains the networks of `kvzap` (surrogates) on texts."""

    name = kind = "kvzap"
    reads = "a text, the request to repeat it and the text again"

    @classmethod
    def check(cls, loaded: LoadedModel, more: Mapping[str, Any]) -> None:
        check_choices(more, target=TARGETS)
        check_least(more, width=0, tokens=1)
        outputs = [place for place in projections(loaded.model) if place.endswith(".o_proj")]
        if more["target"] == "kvzip+" and not outputs:
            raise UserError(
                "--opt target=kvzip+ needs the norms of values after the output projection, but the model has no plain "
                "output projections; use --opt target=kvzip."
            )

    def shapes(self, model: Mapping[str, int], width: int) -> Shapes:
        return surrogate_shapes(model, width)

    def predict(self, new: NewTokens) -> torch.Tensor:
        return log_worth(new)

    def text(self, trace: Trace) -> tuple[list[int], int]:
        """Return the tokens to read, and the length of the text. The tokens are the text (the trace's prompt and
        answer, cut to `tokens` tokens), the request to repeat it, and the text again."""
        text = trace.ids[: int(self.settings.more["tokens"])]
        prompt = ReadPrompt(text, 0, 0, Drafts(self.loaded))
        [probe] = registry.methods.get("kvzip")(chunk=len(text), sinks=0).probes(prompt)
        return [*text, *probe.tokens], len(text)

    def target(self, call: AttentionCall, n: int, trace: Trace) -> torch.Tensor:
        total, heads = call.key.shape[2], call.key.shape[1]
        norms = self.settings.more["target"] == "kvzip+"
        positions = torch.arange(total, device=call.key.device)
        best = call.key.new_zeros(heads, call.query.shape[1] // heads, n, dtype=torch.float32)
        for first in range(total - n, total, BLOCK):
            rows = positions[first : first + BLOCK]
            at = rows[None], positions.expand(1, heads, -1)
            scale: dict[str, Any] = {"scaling": call.scaling, "softcap": call.softcap}
            paid = window_attention(
                call.query[:, :, rows], call.key, *at, None, **scale, reduce_g=None, reduce_q=None
            )  # [1, Hk, g, rows, total]
            weight = 1 / _sizes(call, rows) if norms else 1.0
            best = torch.maximum(best, (paid[0, ..., :n] * weight).amax(dim=2))
        if norms:
            best = best * _output_norms(call.value[0, :, :n].float(), self.outputs[call.layer])
        return best.amax(dim=1).clamp_min(LEAST).log()

    @cached_property
    def outputs(self) -> dict[int, torch.Tensor]:
        """By layer, the Gram matrix W^T W for every query head, [Hq, dv, dv]. W: the head's part of the output
        projection."""
        model = self.loaded.model
        places, heads = projections(model), model_fields(model.config)["num_attention_heads"]
        matrices = ((i, places[f"{i}.o_proj"].weight.detach().float().unflatten(1, (heads, -1))) for i in self.layers)
        return {i: torch.einsum("ohd,ohe->hde", w, w) for i, w in matrices}


def _sizes(call: AttentionCall, rows: torch.Tensor) -> torch.Tensor:
    """Return the norms |x_t| [rows, 1] of the inputs of the layer's attention at the positions `rows`."""
    assert call.hidden is not None
    return call.hidden[0, rows].float().norm(dim=-1, keepdim=True)


def _output_norms(values: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """Return the norms |W_O^h v| [Hk, g, n] of values v [Hk, n, dv], for each query head h of each group. gram: the
    layer's Gram matrices, from `ZapRecipe.outputs`."""
    by_group = gram.unflatten(0, (len(values), -1))
    return torch.einsum("knd,kgde,kne->kgn", values, by_group, values).clamp_min(0).sqrt()
