"""Training of `kvzap`: a small network per layer learns to predict what kvzip finds a token's entries to be worth.

The frozen model reads a text, kvzip's request to repeat it, and the text again, as in `methods/kvzip.py`. For the entry
of token j, with every query t of the repetition and every query head h of the KV head's group,

    target_j = log max over t, h of a_htj |W_O^h v_j| / |x_t|          (KVzip+, arXiv 2601.07891)

where a is causal attention over all that was read and x_t the input of the layer's attention; `target=kvzip` leaves
out both norms. The loss is the mean square error over the text's tokens, KV heads and layers that methods evict. A text
is a prompt and its answer, at most the first `tokens` of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvbench import registry
from kvbench.engine.adapter import projections
from kvbench.engine.attention.geometry import check_equal_heads, check_evicts, for_lengths
from kvbench.engine.attention.interface import AttentionCall
from kvbench.engine.model.load import LoadedModel
from kvbench.engine.model.weights import model_fields
from kvbench.engine.probes import Drafts, ReadPrompt
from kvbench.errors import UserError
from kvbench.eviction.new_tokens import NewTokens
from kvbench.eviction.terms.surrogate import log_worth, surrogate_shapes
from kvbench.eviction.terms.window_attention import window_attention
from kvbench.train.forward import forward
from kvbench.train.recipe import TraceRecipe, check_choices, check_least
from kvbench.train.sparse_masks import plain
from kvbench.train.traces import Trace

BLOCK = 256  # queries per attention call
LEAST = 1e-12  # worth below which the logarithm is cut
FIRST = 8  # texts whose mean target is the networks' first answer
TARGETS = ("kvzip+", "kvzip")


class ZapRecipe(TraceRecipe):
    """Trains the surrogates of `kvzap` on texts.

    `settings.more`: width (hidden units; 0: no hidden layer), tokens (most tokens of a text), target.

    Held-out figures, over all tokens: `loss`, and `r2`, the share of the targets' variance in each KV head that is
    predicted, a mean over KV heads.
    """

    name = kind = "kvzap"
    figure = "loss"
    at_once = 1

    def begin(self) -> None:
        more = self.settings.more
        self.norms = more["target"] == "kvzip+"
        longest = len(self._repeated(max((*self.traces, *self.test), key=lambda trace: len(trace.ids)))[0])
        if longest > self.loaded.context:
            raise UserError(
                f"a text, the request to repeat it and the text again have up to {longest} tokens, more than the "
                f"model's context of {self.loaded.context}. Give fewer --opt tokens."
            )
        geometry = for_lengths(self.loaded.geometry, longest)
        check_evicts(geometry, longest)
        check_equal_heads(geometry)
        self.layers = [g.index for g in geometry if g.evicts]
        generator = torch.Generator().manual_seed(self.settings.seed)
        fields = model_fields(self.loaded.model.config)
        self.trained = {
            name: torch.zeros(shape) if "in" not in name else torch.randn(shape, generator=generator) / shape[-1] ** 0.5
            for name, shape in surrogate_shapes(fields, int(more["width"])).items()
        }
        usual = torch.stack([self._read(trace)[1].mean(dim=-1) for trace in self.traces[:FIRST]]).mean(dim=0)
        self.trained["out.bias"][self.layers] = usual.cpu()
        self.trained = {n: t.to(self.loaded.device).requires_grad_(True) for n, t in self.trained.items()}

    @classmethod
    def check(cls, loaded: LoadedModel, more: Mapping[str, Any]) -> None:
        check_choices(more, target=TARGETS)
        check_least(more, width=0, tokens=1)
        outputs = [place for place in projections(loaded.model) if place.endswith(".o_proj")]
        if more["target"] == "kvzip+" and not outputs:
            raise UserError("the model has no plain output projections, so there are no norms; use --opt target=kvzip.")

    def parameters(self) -> dict[str, torch.Tensor]:
        return self.trained

    def loss(self, step: int, share: slice) -> tuple[torch.Tensor, dict[str, float]]:
        errors = [(guess - target).square().mean() for guess, target in map(self._pair, self.batch(step, share))]
        return torch.stack(errors).mean(), {}

    @torch.no_grad()
    def held_out(self) -> dict[str, float]:
        pairs = [self._pair(trace) for trace in self.test]
        guess, target = (torch.cat(parts, dim=-1).double() for parts in zip(*pairs))  # [L, Hk, tokens of all texts]
        error = (guess - target).square().mean(dim=-1)
        return {"loss": float(error.mean()), "r2": float(1 - (error / target.var(dim=-1, unbiased=False)).mean())}

    def _pair(self, trace: Trace) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the networks predict for the tokens of a text, and the targets, both [layers, Hk, n]."""
        hidden, target = self._read(trace)
        return torch.cat([self._predicted(layer, x, target) for layer, x in zip(self.layers, hidden)]), target

    def _predicted(self, layer: int, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        none = target.new_empty(1, target.shape[1], target.shape[2], 0)
        return log_worth(NewTokens(layer=layer, hidden=hidden, keys=none, values=none, weights=self.trained))

    def _read(self, trace: Trace) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        """Return the hidden states [1, n, D] of a text in every layer, and the targets [layers, Hk, n]."""
        ids, n = self._repeated(trace)
        reader = _Reader(n, self.layers, _outputs(self.loaded.model, self.layers) if self.norms else {})
        with torch.no_grad():
            forward(self.loaded.model, reader, hidden=True, input_ids=torch.tensor([ids], device=self.loaded.device))
        hidden, worth = zip(*(reader.found[layer] for layer in self.layers))
        return hidden, torch.stack(worth).clamp_min(LEAST).log()

    def _repeated(self, trace: Trace) -> tuple[list[int], int]:
        """Return a text, the request to repeat it, and the text again; and the text's number of tokens."""
        text = trace.ids[: int(self.settings.more["tokens"])]
        prompt = ReadPrompt(text, 0, 0, self.loaded.tokenizer, Drafts(lambda name: None, self.loaded))
        [probe] = registry.methods.get("kvzip")(chunk=len(text), sinks=0).probes(prompt)
        return [*text, *probe.tokens], len(text)


class _Reader:
    """Computes a model's attention while it reads a text twice; keeps hidden states and worth of the first reading.

    n: tokens of the text; the last n tokens repeat it. layers: those that methods evict. outputs: by layer, the Gram
    matrices [Hq, dv, dv] of the output projection; without them the worth has no norms. found: by layer, hidden states
    [1, n, D] and worth [Hk, n].
    """

    def __init__(self, n: int, layers: Sequence[int], outputs: Mapping[int, torch.Tensor]) -> None:
        self.n, self.layers, self.outputs = n, frozenset(layers), outputs
        self.found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        if call.layer in self.layers:  # perhaps with a sliding window that is longer than all texts
            assert call.hidden is not None
            self.found[call.layer] = call.hidden[:, : self.n].float(), self._worth(call)
        return plain(call)

    def _worth(self, call: AttentionCall) -> torch.Tensor:
        total, heads = call.key.shape[2], call.key.shape[1]
        positions = torch.arange(total, device=call.key.device)
        best = call.key.new_zeros(heads, call.query.shape[1] // heads, self.n, dtype=torch.float32)
        for first in range(total - self.n, total, BLOCK):
            rows = positions[first : first + BLOCK]
            at = rows[None], positions.expand(1, heads, -1)
            scale: dict[str, Any] = {"scaling": call.scaling, "softcap": call.softcap}
            paid = window_attention(
                call.query[:, :, rows], call.key, *at, None, **scale, reduce_g=None, reduce_q=None
            )  # [1, Hk, g, rows, total]
            best = torch.maximum(best, (paid[0, ..., : self.n] * self._weights(call, rows)).amax(dim=2))
        if call.layer in self.outputs:
            best = best * _output_norms(call.value[0, :, : self.n].float(), self.outputs[call.layer])
        return best.amax(dim=1)

    def _weights(self, call: AttentionCall, rows: torch.Tensor) -> torch.Tensor:
        """Return for each of these queries the factor by which its attention is multiplied, [rows, 1]."""
        assert call.hidden is not None
        sizes = call.hidden[0, rows].float().norm(dim=-1, keepdim=True)
        return 1 / sizes if call.layer in self.outputs else torch.ones_like(sizes)


def _outputs(model: Any, layers: Sequence[int]) -> dict[int, torch.Tensor]:
    """Return the Gram matrices [Hq, dv, dv] of each layer's output projection, one per query head."""
    places, heads = projections(model), model_fields(model.config)["num_attention_heads"]
    matrices = ((i, places[f"{i}.o_proj"].weight.detach().float().unflatten(1, (heads, -1))) for i in layers)
    return {i: torch.einsum("ohd,ohe->hde", w, w) for i, w in matrices}


def _output_norms(values: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """Return |W_O^h v| of values [Hk, n, dv] for every query head h of the group, [Hk, g, n]."""
    by_group = gram.unflatten(0, (len(values), -1))
    return torch.einsum("knd,kgde,kne->kgn", values, by_group, values).clamp_min(0).sqrt()
