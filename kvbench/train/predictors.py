"""Trains networks that read a token's hidden state in every layer and predict a number for each of its entries.

A subclass defines the network, the numbers that it learns to predict for a text (targets), and the loss.

Letters: b texts, L layers from which methods evict entries, Hk KV heads, n or t tokens, D hidden size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from kvbench.engine.attention.geometry import check_equal_heads, check_evicts, for_lengths
from kvbench.engine.attention.interface import AttentionCall
from kvbench.engine.model.weights import model_fields
from kvbench.errors import UserError
from kvbench.eviction.learned import Shapes
from kvbench.eviction.new_tokens import NewTokens
from kvbench.train.forward import forward
from kvbench.train.recipe import TRAIN_SHORTER, TraceRecipe
from kvbench.train.sparse_masks import plain
from kvbench.train.traces import Trace

FIRST = 8  # texts whose mean target is the initial bias of the output, for networks with a bias


class PredictorRecipe(TraceRecipe):
    """Trains one network for each evicted layer.

    Held-out figures, over all tokens: `loss`, and `r2`, the share of the targets' variance that the networks explain.
    `r2` is a mean over layers and KV heads.
    """

    figure = "loss"
    at_once = 1
    reads: ClassVar[str]  # the tokens that the model reads for a trace, in words, for messages

    @abstractmethod
    def shapes(self, model: Mapping[str, int], width: int) -> Shapes:
        """Return the shapes of the networks' tensors, stacked over the layers of the model."""

    @abstractmethod
    def predict(self, new: NewTokens) -> torch.Tensor:
        """Return the predictions [b, Hk, t] for new tokens of one layer, by this layer's network in `new.weights`."""

    @abstractmethod
    def text(self, trace: Trace) -> tuple[list[int], int]:
        """Return the tokens that the model reads for a trace, and a number n. The networks learn the targets of the
        first n of these tokens."""

    @abstractmethod
    def target(self, call: AttentionCall, n: int, trace: Trace) -> torch.Tensor:
        """Return the targets [Hk, n] of the first n tokens of a trace in one layer. call: the attention call of this
        layer."""

    def mistake(self, guess: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss of the predictions `guess` for the targets, both [L, Hk, n]; here the mean square error."""
        return (guess - target).square().mean()

    def begin(self) -> None:
        more = self.settings.more
        longest = max(len(self.text(trace)[0]) for trace in (*self.traces, *self.test))
        if longest > self.loaded.context:
            raise UserError(
                f"{self.reads} have up to {longest} tokens, but the model's context has {self.loaded.context}. "
                "Give shorter texts with --data; for kvzap, a smaller --opt tokens=N suffices."
            )
        geometry = for_lengths(self.loaded.geometry, longest)
        check_evicts(geometry, longest, TRAIN_SHORTER)
        check_equal_heads(geometry)
        self.layers = [g.index for g in geometry if g.evicts]
        generator = torch.Generator().manual_seed(self.settings.seed)
        fields = model_fields(self.loaded.model.config)
        self.trained = {
            name: torch.zeros(shape) if "in" not in name else torch.randn(shape, generator=generator) / shape[-1] ** 0.5
            for name, shape in self.shapes(fields, int(more["width"])).items()
        }
        if "out.bias" in self.trained:
            usual = torch.stack([self.read(trace)[1].mean(dim=-1) for trace in self.traces[:FIRST]]).mean(dim=0)
            self.trained["out.bias"][self.layers] = usual.cpu()
        self.trained = {n: t.to(self.loaded.device).requires_grad_(True) for n, t in self.trained.items()}

    def card(self) -> dict[str, Any]:
        return super().card() | {"layers": self.layers}

    def parameters(self) -> dict[str, torch.Tensor]:
        return self.trained

    def loss(self, step: int, share: slice) -> tuple[torch.Tensor, dict[str, float]]:
        return torch.stack([self.mistake(*self.pair(trace)) for trace in self.batch(step, share)]).mean(), {}

    @torch.no_grad()
    def held_out(self) -> dict[str, float]:
        pairs = [self.pair(trace) for trace in self.test]
        loss = torch.stack([self.mistake(*pair) * pair[0].shape[-1] for pair in pairs]).sum()
        guess, target = (torch.cat(parts, dim=-1).double() for parts in zip(*pairs))  # [L, Hk, tokens of all texts]
        error = (guess - target).square().mean(dim=-1)
        r2 = float(1 - (error / target.var(dim=-1, unbiased=False)).mean())
        return {"loss": float(loss) / guess.shape[-1], "r2": r2}

    def pair(self, trace: Trace) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the predictions for the first n tokens of a trace, and their targets, both [L, Hk, n]; `text` returns
        n."""
        hidden, target = self.read(trace)
        return torch.cat([self._predicted(layer, x, target) for layer, x in zip(self.layers, hidden)]), target

    def _predicted(self, layer: int, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        none = target.new_empty(1, target.shape[1], target.shape[2], 0)
        return self.predict(NewTokens(layer=layer, hidden=hidden, keys=none, values=none, weights=self.trained))

    def read(self, trace: Trace) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        """Let the model read a trace. Return each layer's hidden states [1, n, D] of the first n tokens, and the
        targets [L, Hk, n] of these tokens; `text` returns n."""
        ids, n = self.text(trace)
        found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def attend(call: AttentionCall) -> torch.Tensor:
            if call.layer in self.layers:  # the layer's sliding window, if it has one, is longer than all texts
                assert call.hidden is not None
                found[call.layer] = call.hidden[:, :n].float(), self.target(call, n, trace)
            return plain(call)

        with torch.no_grad():
            forward(self.loaded.model, attend, hidden=True, input_ids=torch.tensor([ids], device=self.loaded.device))
        hidden, target = zip(*(found[layer] for layer in self.layers))
        return hidden, torch.stack(target)
