"""Trains `locret`: its retaining heads learn how strongly an answer's queries will attend to a prompt's tokens.

The frozen model reads a prompt and its answer. The retaining heads learn to predict, for the entry of each token j
among the first `tokens` tokens of the prompt:

    target_j = max over t, h of the attention logit z_htj     (before the softmax, as in the code of arXiv 2410.01805)

t are the queries of the answer, and h the query heads of the KV head's group. The loss has two terms, both over the
layers from which methods evict entries. The first term is the smooth L1 distance between predicted scores and targets,
a mean over the tokens j, KV heads and layers. The second term is `smooth` times the square difference between the
predicted scores of neighbouring tokens. It is averaged over tokens and KV heads, and summed over layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvbench.engine.attention.interface import AttentionCall
from kvbench.engine.model.load import LoadedModel
from kvbench.errors import UserError, quote
from kvbench.eviction.learned import Shapes
from kvbench.eviction.new_tokens import NewTokens
from kvbench.eviction.terms.retaining import retained, retaining_shapes
from kvbench.train.predictors import PredictorRecipe
from kvbench.train.recipe import check_least
from kvbench.train.traces import Trace

BLOCK = 64  # queries whose logits are in memory at a time


class LocretRecipe(PredictorRecipe):
    """Trains the retaining heads of `locret` on answers."""

    name = kind = "locret"
    reads = "a prompt and its answer"

    @classmethod
    def check(cls, loaded: LoadedModel, more: Mapping[str, Any]) -> None:
        check_least(more, width=1, tokens=1, smooth=0)

    def begin(self) -> None:
        if short := [trace.name for trace in (*self.traces, *self.test) if not trace.prompt or not trace.answer]:
            raise UserError(
                f"row {quote(short[0])} of --data has no prompt or no answer, and locret needs both. Leave the row out."
            )
        super().begin()

    def shapes(self, model: Mapping[str, int], width: int) -> Shapes:
        return retaining_shapes(model, width)

    def predict(self, new: NewTokens) -> torch.Tensor:
        return retained(new)

    def text(self, trace: Trace) -> tuple[list[int], int]:
        return list(trace.ids), min(len(trace.prompt), int(self.settings.more["tokens"]))

    def target(self, call: AttentionCall, n: int, trace: Trace) -> torch.Tensor:
        keys = call.key[0, :, :n].float()
        queries = call.query[0, :, len(trace.prompt) :].float().unflatten(0, (len(keys), -1))  # [Hk, g, t, d]
        best = keys.new_full(keys.shape[:2], float("-inf"))
        for some in queries.split(BLOCK, dim=2):
            logits = torch.einsum("kgtd,knd->kgtn", some, keys) * call.scaling
            logits = logits if call.softcap is None else call.softcap * torch.tanh(logits / call.softcap)
            best = torch.maximum(best, logits.amax(dim=(1, 2)))
        return best

    def mistake(self, guess: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        uneven = guess.diff(dim=-1).square()
        smooth = float(self.settings.more["smooth"]) * len(guess)
        return torch.nn.functional.smooth_l1_loss(guess, target) + smooth * (uneven.mean() if uneven.numel() else 0.0)
