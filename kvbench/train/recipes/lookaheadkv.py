"""Trains `lookaheadkv`: learned tokens after a prompt learn to attend to the prompt as its answer will.

A learned token is an embedding that belongs to no token of the vocabulary; it is trained. The option `rows` is the
number of learned tokens. Let X be a prompt, Y its answer (by default the model's own) and P the learned tokens. In each
layer and query head:

    target_j = mean over Y of softmax(q . k)_j   over the keys of X and Y, as the model attends
    guess_j  = mean over P of softmax(q . k)_j   over the keys of X and P, where the adapter acts on P
    loss     = mean over layers and heads of KL( target / |target|_1  ||  guess / |guess|_1 )   over j in X

(arXiv 2603.10899). The adapter is a low-rank change of the model's linear layers; it acts on the learned tokens only.
Only P and the adapter are trained. The prompt's keys and values depend on neither, so the prompt is read once, without
a gradient.

Letters of shapes: L layers from which methods evict entries (without a sliding window, or with one that holds the
longest text), Hq query heads, T tokens of the prompt, n keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvbench.engine.adapter import adapted, projections
from kvbench.engine.attention.geometry import check_evicts, for_lengths
from kvbench.engine.attention.grouped import causal_bias
from kvbench.engine.attention.interface import AttentionCall
from kvbench.engine.attention.positions import has_position_table
from kvbench.engine.model.load import LoadedModel
from kvbench.engine.probes import refuse_inputs_per_layer
from kvbench.errors import UserError, counted, quote
from kvbench.train.forward import forward
from kvbench.train.recipe import TRAIN_SHORTER, TraceRecipe, check_least
from kvbench.train.sparse_masks import plain
from kvbench.train.traces import Trace

EPSILON = 1e-9  # keeps the logarithm finite for a key without attention
ALL, NONE = "all", "none"  # values of the option `places`


class LookaheadRecipe(TraceRecipe):
    """Trains the embeddings of the learned tokens, and an adapter, on traces.

    `settings.more`: rows (number of learned tokens); rank, alpha and places (the adapter's rank, scale and linear
    layers); budget (for `hit`).

    Held-out figures: `loss`, and `hit`: of the `budget` entries with the largest target, the share that is also among
    the `budget` entries with the largest guess.
    """

    name, kind, figure = "lookaheadkv", "lookaheadkv", "loss"
    at_once = 1

    def begin(self) -> None:
        more, model = self.settings.more, self.loaded.model
        self.rows, self.rank = int(more["rows"]), int(more["rank"])
        given = len(self.traces) + len(self.test)
        if has_position_table(model):
            self.traces, self.test = self._fitting(self.traces), self._fitting(self.test)
        self.too_long = given - len(self.traces) - len(self.test)
        longest = max(len(trace.ids) for trace in (*self.traces, *self.test))
        geometry = for_lengths(self.loaded.geometry, longest)
        check_evicts(geometry, longest, TRAIN_SHORTER)
        self.evicted = frozenset(layer.index for layer in geometry if layer.evicts)
        generator = torch.Generator().manual_seed(self.settings.seed)
        embedding = model.get_input_embeddings()
        table = embedding.weight
        # Learned tokens begin as embeddings of random tokens, which the model can read; B = 0: no effect at first.
        tokens = torch.randint(0, table.shape[0], (self.rows,), generator=generator)
        with torch.no_grad():
            begun = embedding(tokens.to(table.device))  # not a row of the table, because the module may scale it
        self.trained = {"embeddings": begun.float().clone()}
        for place, linear in adapted_layers(model, more.get("places", ALL)).items():
            a = torch.randn(self.rank, linear.in_features, generator=generator) / linear.in_features**0.5
            self.trained[f"A.{place}"] = a.to(table.device)
            self.trained[f"B.{place}"] = torch.zeros(linear.out_features, self.rank, device=table.device)
        for tensor in self.trained.values():
            tensor.requires_grad_(True)
        self.scaling = torch.tensor([float(more["alpha"]) / self.rank], device=table.device)

    @classmethod
    def check(cls, loaded: LoadedModel, more: Mapping[str, Any]) -> None:
        check_least(more, rows=1, rank=1, budget=1)
        refuse_inputs_per_layer(loaded.model.config)
        adapted_layers(loaded.model, more.get("places", ALL))

    def about_data(self) -> list[str]:
        long = f"left out: {counted(self.too_long, 'answer')} whose prompt leaves no positions for {self.rows} learned"
        return [f"{long} tokens; {len(self.traces)} train, {len(self.test)} are held out."] if self.too_long else []

    def _fitting(self, traces: Sequence[Trace]) -> list[Trace]:
        """Return the traces whose prompt leaves enough of the model's positions for the learned tokens. Raises
        UserError if there are none."""
        room = self.loaded.context - self.rows
        if fitting := [trace for trace in traces if len(trace.prompt) <= room]:
            return fitting
        raise UserError(
            f"all prompts to train on, or all held-out prompts, have more than {room} tokens, and this model has only "
            f"{self.loaded.context} positions, {self.rows} of them for learned tokens. Give shorter questions, or a "
            "smaller --opt rows."
        )

    def card(self) -> dict[str, Any]:
        return super().card() | {"layers": sorted(self.evicted)}

    def parameters(self) -> dict[str, torch.Tensor]:
        return self.trained

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: t.detach() for name, t in self.trained.items()} | {"scaling": self.scaling}

    def loss(self, step: int, share: slice) -> tuple[torch.Tensor, dict[str, float]]:
        losses = [self._divergence(*self._shares(trace)) for trace in self.batch(step, share)]
        return torch.stack(losses).mean(), {}

    @torch.no_grad()
    def held_out(self) -> dict[str, float]:
        losses, hits = [], []
        budget, kv_heads = int(self.settings.more["budget"]), max(g.kv_heads for g in self.loaded.geometry)
        for trace in self.test:
            target, guess = self._shares(trace)
            losses.append(float(self._divergence(target, guess)))
            hits.append(_hit(target, guess, kv_heads, min(budget, len(trace.prompt))))
        return {"loss": sum(losses) / len(losses), "hit": sum(hits) / len(hits)}

    def _shares(self, trace: Trace) -> tuple[torch.Tensor, torch.Tensor]:
        """Return target and guess, both [L, Hq, T]. They are the mean attention that the answer's tokens (target) and
        the learned tokens (guess) pay to the prompt."""
        model, prompt = self.loaded.model, len(trace.prompt)
        past = _Past(prompt, self.evicted)
        with torch.no_grad():
            forward(model, past, input_ids=torch.tensor([trace.ids], device=self.loaded.device))
        look = _Look(past)
        rows = self.trained["embeddings"].to(model.get_input_embeddings().weight.dtype)
        with adapted(model, {**self.trained, "scaling": self.scaling}):
            forward(model, look, start=prompt, inputs_embeds=rows[None])
        return torch.stack(past.shares), torch.stack(look.shares)

    @staticmethod
    def _divergence(target: torch.Tensor, guess: torch.Tensor) -> torch.Tensor:
        wanted = target / target.sum(-1, keepdim=True).clamp_min(EPSILON)
        guessed = guess / guess.sum(-1, keepdim=True).clamp_min(EPSILON)
        ratio = (wanted + EPSILON).log() - (guessed + EPSILON).log()
        return (wanted * ratio).sum(-1).mean()


def adapted_layers(model: Any, places: str) -> dict[str, torch.nn.Linear]:
    """Return the linear layers that get an adapter, by layer and name, such as "0.q_proj".

    places: names of linear layers, separated by commas; "all": all linear layers of the decoder; "none": no adapter.
    Raises UserError for a name that no linear layer has, or if the decoder has no linear layers.
    """
    if places == NONE:
        return {}
    every = projections(model)
    last = {place: place.rpartition(".")[2] for place in every}
    known = list(dict.fromkeys(last.values()))
    if not known:
        raise UserError(f"{quote(type(model).__name__)} has no linear layers in its decoder; use --opt places=none.")
    names = known if places == ALL else [name.strip() for name in places.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise UserError(
            f"--opt places must be {ALL}, {NONE}, or names from {', '.join(known)}; got {quote(unknown[0])}."
        )
    return {place: linear for place, linear in every.items() if last[place] in names}


class _Past:
    """Computes the attention while the model reads prompt and answer, and records it.

    `keys` has the prompt's keys and values by layer; `shares` has, for each layer in `evicted`, the mean attention of
    the answer to each token of the prompt.
    """

    def __init__(self, prompt: int, evicted: frozenset[int]) -> None:
        self.prompt, self.evicted = prompt, evicted
        self.keys: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.shares: list[torch.Tensor] = []

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        self.keys[call.layer] = call.key[:, :, : self.prompt], call.value[:, :, : self.prompt]
        if call.layer in self.evicted:
            rows = torch.arange(self.prompt, call.key.shape[2], device=call.key.device)
            paid = _paid(call, call.query[:, :, self.prompt :], call.key, rows)
            self.shares.append(paid[:, :, : self.prompt].mean(1))
        return plain(call)


class _Look:
    """Computes the attention of the learned tokens, which read the prompt's keys and values from `past`."""

    def __init__(self, past: _Past) -> None:
        self.past = past
        self.shares: list[torch.Tensor] = []

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        prompt = self.past.prompt
        before, values = self.past.keys[call.layer]
        keys, values = torch.cat([before, call.key], dim=2), torch.cat([values, call.value], dim=2)
        rows = torch.arange(prompt, keys.shape[2], device=keys.device)
        if call.layer in self.past.evicted:
            self.shares.append(_paid(call, call.query, keys, rows)[:, :, :prompt].mean(1))
        bias = causal_bias(rows, torch.arange(keys.shape[2], device=keys.device), call.window, call.query.dtype)
        return call.attend(call.query, keys, values, bias[None, None])


def _paid(call: AttentionCall, queries: torch.Tensor, keys: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the attention [Hq, rows, n] that queries at the positions `rows` pay to keys up to their own position."""
    _, heads, count, d = queries.shape
    group = queries.reshape(keys.shape[1], heads // keys.shape[1] * count, d)
    logits = (group @ keys[0].transpose(-1, -2)).float().view(heads, count, -1) * call.scaling
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    hidden = torch.arange(keys.shape[2], device=keys.device)[None, :] > rows[:, None]
    return logits.masked_fill(hidden, float("-inf")).softmax(dim=-1)


def _hit(target: torch.Tensor, guess: torch.Tensor, kv_heads: int, budget: int) -> float:
    """Return which share of the `budget` entries with the largest target is also among the `budget` entries with the
    largest guess.

    The share is a mean over layers and KV heads. Target and guess are first averaged over the query heads that share a
    KV head.
    """
    kept = []
    for shares in (target, guess):
        merged = shares.unflatten(1, (kv_heads, -1)).mean(dim=2)
        kept.append(torch.zeros_like(merged).scatter_(-1, merged.topk(budget, dim=-1).indices, 1.0))
    return float((kept[0] * kept[1]).sum(-1).mean() / budget)
