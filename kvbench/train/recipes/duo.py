"""Trains `duo`: gradient descent finds the heads that need their whole cache.

A trained number alpha per KV head mixes two kinds of attention in the query heads of its group:

    out = alpha full + (1 - alpha) streaming       streaming: the first `sinks` and the newest `recent` keys
    loss = mean of (h - h')^2 over the positions that predict the answer  +  reg * mean of |alpha|

Here h are the last layer's hidden states with full attention in all heads, and h' those with the mixture. The texts are
retrieval problems: the answer stands far before the question (DuoAttention, arXiv 2410.10819, section 2.3). Alpha
begins at 1 and is clamped to [0, 1]. The penalty lowers every alpha; the first term keeps alpha high in the heads that
the answers need. Only alpha is trained.

Letters: Hq query heads, D hidden size, Dv size of a value, t queries whose attention is computed at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from kvbench.engine.attention.geometry import check_evicts, for_lengths, homes
from kvbench.engine.attention.grouped import causal_bias
from kvbench.engine.attention.interface import AttentionCall, route
from kvbench.engine.meta import Answers
from kvbench.engine.model.load import LoadedModel
from kvbench.errors import SetupError
from kvbench.train.forward import ROWS, in_blocks
from kvbench.train.head_data import Example
from kvbench.train.recipe import TRAIN_SHORTER, Recipe, Settings, check_least, with_gradient
from kvbench.train.sparse_pass import recomputed, recomputes


class DuoRecipe(Recipe):
    """Trains the mixing weights alpha on retrieval problems."""

    name, kind, figure = "duo", "duo", "loss"
    version = 2  # version 1 drew batches with replacement

    def __init__(
        self, loaded: LoadedModel, settings: Settings, examples: Sequence[Example], held_out: Sequence[Example]
    ) -> None:
        super().__init__(settings)
        heads = {g.kv_heads for g in loaded.geometry}
        if len(heads) > 1:
            raise SetupError(
                "this recipe needs equally many KV heads in all layers; the model's layers differ. Use another model."
            )
        self.loaded, self.examples, self.test = loaded, examples, held_out
        self.sinks, self.recent = int(settings.more["sinks"]), int(settings.more["recent"])
        check_least(settings.more, sinks=0, recent=1)
        self.reg = float(settings.more["reg"])
        loaded.model.requires_grad_(False)
        longest = max(len(example.ids) for example in (*examples, *held_out))
        geometry = for_lengths(loaded.geometry, longest)
        check_evicts(geometry, longest, TRAIN_SHORTER)
        # Layers with a sliding window or without own entries have no alpha to train. The table has 1 for them, which no
        # run reads (`card`).
        self.layers, self.homes = [g.index for g in geometry if g.evicts], homes(geometry)
        self.again = recomputes(loaded.model, "auto")
        self.alpha = torch.ones(len(self.layers), heads.pop(), device=loaded.device, requires_grad=True)

    @classmethod
    def answers(cls, settings: Settings, longest: int) -> Answers:
        streamed = int(settings.more["sinks"]) + int(settings.more["recent"]) + ROWS
        return Answers(marked=lambda length: min(length, streamed))

    def parameters(self) -> dict[str, torch.Tensor]:
        return {"alpha": self.alpha}

    def tensors(self) -> dict[str, torch.Tensor]:
        table = torch.ones(len(self.homes), self.alpha.shape[1])
        table[self.layers] = self.alpha.detach().cpu()
        return {"alpha": table}

    def put(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.alpha.copy_(tensors["alpha"][self.layers])

    @torch.no_grad()
    def after_step(self) -> None:
        self.alpha.clamp_(0, 1)

    def loss(self, step: int, share: slice) -> tuple[torch.Tensor, dict[str, float]]:
        batch = self.draw(self.examples, step)[share]
        deviation = torch.stack([self._deviation(example, self.alpha) for example in batch]).mean()
        size = self.alpha.abs().mean()
        return deviation + self.reg * size, {"deviation": float(deviation.detach()), "alpha": float(size.detach())}

    @torch.no_grad()
    def held_out(self) -> dict[str, float]:
        rank = self.alpha.flatten().argsort(stable=True).argsort(stable=True).view_as(self.alpha)
        half = (rank >= self.alpha.numel() // 2).to(self.alpha.dtype)
        soft, hard = (
            float(torch.stack([self._deviation(example, alpha) for example in self.test]).mean())
            for alpha in (self.alpha, half)
        )
        size = float(self.alpha.mean())
        return {"loss": soft + self.reg * size, "deviation": soft, "alpha": size, "half": hard}

    def card(self) -> dict[str, Any]:
        return {
            "examples": len(self.examples),
            "held_out": len(self.test),
            "tokens": sum(len(example.ids) for example in self.examples),
            "layers": self.layers,
        }

    def _deviation(self, example: Example, alpha: torch.Tensor) -> torch.Tensor:
        """Return the mean square difference between the final hidden states with the mixture and with full attention.
        The mean is over the positions `example.rows`, whose hidden states predict tokens of the answer."""
        with torch.no_grad(), self._mixing({}):
            full = self._hidden(example)
        by_layer = dict(zip(self.layers, alpha))
        shared = {layer: by_layer[home] for layer, home in self.homes.items() if home in by_layer}
        with self._mixing(shared), recomputed(self.loaded.model, self.again):
            deviation = (self._hidden(example) - full).square().mean()
            # The backward pass recomputes layers, so it must run while the attention is replaced.
            return with_gradient(deviation, [alpha]) if deviation.requires_grad else deviation

    def _mixing(self, alpha: dict[int, torch.Tensor]) -> AbstractContextManager[None]:
        """Inside the `with` statement, replace the model's attention by the mixture. alpha: by layer, one number per KV
        head; layers without alpha use full attention."""
        return route(self.loaded.model, _Mixture(alpha, self.sinks, self.recent))

    def _hidden(self, example: Example) -> torch.Tensor:
        """Return the final hidden states at the positions `example.rows`, after the last norm, [rows, D] in float32."""
        device = self.loaded.device
        out = self.loaded.model.get_decoder()(
            input_ids=torch.tensor([example.ids], device=device),
            position_ids=torch.arange(len(example.ids), device=device)[None],
            attention_mask=None,
            past_key_values=None,
            use_cache=False,
        )
        return out.last_hidden_state[0, list(example.rows)].float()


class _Mixture:
    """Computes a model's attention as a mixture: alpha times full plus (1 - alpha) times streaming attention."""

    def __init__(self, alpha: dict[int, torch.Tensor], sinks: int, recent: int) -> None:
        self.alpha, self.sinks, self.recent = alpha, sinks, recent

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        return in_blocks(call, partial(self._rows, call), ROWS)

    def _rows(
        self, call: AttentionCall, first: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Return the mixed attention output [1, t, Hq, Dv] of t queries, the first of which is at position `first`."""
        last = key.shape[2]
        rows, keys = (torch.arange(start, last, device=key.device) for start in (first, 0))
        full = call.attend(query, key, value, causal_bias(rows, keys, call.window, query.dtype)[None, None])
        if call.layer not in self.alpha:
            return full
        seen = (keys < self.sinks) | (keys > first - self.recent)  # keys that at least one query sees
        keys = keys[seen]
        old = (rows[:, None] - keys >= self.recent) & (keys >= self.sinks)
        bias = causal_bias(rows, keys, call.window, query.dtype).masked_fill(old, float("-inf"))[None, None]
        streaming = call.attend(query, key[:, :, seen], value[:, :, seen], bias)
        alpha = self.alpha[call.layer]
        share = alpha.repeat_interleave(query.shape[1] // len(alpha)).to(full.dtype)[:, None]  # [Hq, 1]
        return share * full + (1 - share) * streaming
