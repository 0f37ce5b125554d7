"""Compares the model's predictions under eviction with its predictions with the full cache, for a batch of traces."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from kvbench.engine.attention.interface import AttentionCall
from kvbench.engine.cache.prompt import PromptCache
from kvbench.engine.cache.prompt_layer import PromptLayer
from kvbench.replay.reader import Listener
from kvbench.replay.reference import Held, Reference
from kvbench.replay.traces import ForcedTrace

Floats = NDArray[np.float64]
PER_TOKEN = ("loss", "loss_full", "entropy", "divergence", "agrees")


@dataclass(slots=True, kw_only=True)
class TraceFigures:
    """The figures of one trace read under eviction, compared with the full cache. The answer has n tokens."""

    trace: ForcedTrace
    loss: Floats  # [n] negative log-likelihood of every token in nats, under eviction
    loss_full: Floats  # [n] the same with the full cache
    entropy: Floats  # [n] entropy of the predictions with the full cache
    divergence: Floats  # [n] KL(full || evicted)
    agrees: Floats  # [n] 1 if both caches predict the same greedy token, else 0
    cosine: Floats  # [L, Hq] cosine of a head's outputs with both caches, summed over `rows` tokens
    rows: int  # number of tokens in these sums
    lost: float  # full cache's attention to dropped entries, mean over layers and heads, summed over `rows` tokens
    overlap: float  # share of the oracle's entries that the method holds too, summed over `choices` blocks
    choices: int
    entries: float  # number of entries held per layer and KV head, summed over `rows` tokens
    most: float  # largest number of entries held per layer and KV head


class Comparison(Listener):
    """Compares a batch that is read under eviction with the same batch read with the full cache (`reference`).

    copies: heads of the cache per KV head of the model; more than 1 for methods that keep entries per query head.
    oracle: the entries that the oracle held at the same budget (`Reference.oracle`); None if there is no oracle. held:
    a list that receives, at the beginning of each block (`interval` tokens of the answers), the entries that the method
    holds (`held_tokens`).
    """

    def __init__(self, reference: Reference, copies: int, oracle: Held | None = None, held: Held | None = None) -> None:
        self.reference, self.copies, self.oracle = reference, copies, oracle
        self.held = [] if held is None else held
        b = len(reference.traces)
        self._tokens: list[tuple[torch.Tensor, ...]] = []
        self._cosine = {layer: torch.zeros(b, out.shape[2]).double() for layer, out in reference.outputs.items()}
        self._lost, self._overlap, self._choices = torch.zeros(b).double(), torch.zeros(b).double(), 0
        self._entries = self._most = 0.0

    def block(self, index: int) -> None:
        reference, seen = self.reference, self.cache.seen
        held = held_tokens(self.cache, reference, reference.total)
        self.held.append(held)
        paid = torch.stack([a[:, :, index, :seen] for a in reference.attention.values()])  # [L, b, Hk, seen]
        lost = (paid * (1 - held[..., :seen])).sum(dim=-1).mean(dim=(0, 2)) * reference.interval
        self._lost += lost.double().cpu()
        if self.oracle is not None:
            wanted = self.oracle[index][..., :seen]
            if bool((wanted == 0).any()):  # the oracle has dropped entries
                share = (wanted * held[..., :seen]).sum(dim=-1) / wanted.sum(dim=-1)
                self._overlap += share.mean(dim=(0, 2)).double().cpu()
                self._choices += 1

    def attended(self, call: AttentionCall, first: int, out: torch.Tensor) -> None:
        if call.layer not in self._cosine:
            return
        full = self.reference.outputs[call.layer][:, first : first + out.shape[1]]
        alike = F.cosine_similarity(out.float(), full.float(), dim=-1)  # [b, t, Hq]
        self._cosine[call.layer] += alike.sum(dim=1).double().cpu()

    def predicted(self, first: int, logits: torch.Tensor) -> None:
        count = logits.shape[1]
        part = slice(first, first + count)
        evicted = logits.double().log_softmax(dim=-1)
        full = self.reference.logits[:, part].double().log_softmax(dim=-1)
        chance = full.exp()
        target = self.reference.targets[:, part, None]
        figures = (  # in the order of PER_TOKEN
            -evicted.gather(-1, target)[..., 0],
            -full.gather(-1, target)[..., 0],
            -torch.where(chance > 0, chance * full, 0.0).sum(dim=-1),
            torch.where(chance > 0, chance * (full - evicted), 0.0).sum(dim=-1).clamp_min(0.0),
            (evicted.argmax(dim=-1) == full.argmax(dim=-1)).double(),
        )
        self._tokens.append(figures)
        if first:  # the first prediction comes from the prompt, before any block of the answer
            after = self.cache.held() * self.copies
            self._entries += count * after - count * (count - 1) / 2 * self.copies
            self._most = max(self._most, after)

    def figures(self) -> list[TraceFigures]:
        """Return the figures of every trace in the batch. Call this after the batch was read."""
        columns = [torch.cat(parts, dim=1).cpu().numpy() for parts in zip(*self._tokens)]
        cosine = torch.stack(list(self._cosine.values()), dim=1).numpy()  # [b, L, Hq]
        return [
            TraceFigures(
                trace=trace,
                **{name: column[i] for name, column in zip(PER_TOKEN, columns)},
                cosine=cosine[i],
                rows=self.reference.length - 1,
                lost=float(self._lost[i]),
                overlap=float(self._overlap[i]),
                choices=self._choices,
                entries=self._entries,
                most=self._most,
            )
            for i, trace in enumerate(self.reference.traces)
        ]


def held_tokens(cache: PromptCache, reference: Reference, total: int) -> torch.Tensor:
    """Return [L, b, Hk, total]: for each of the first `total` tokens, 1 if the cache holds the token's entry, else 0.
    If the cache keeps entries per query head, the value is the mean over the query heads of a group."""
    return torch.stack([_held(cache.layers[i], paid.shape[1], total) for i, paid in reference.attention.items()])


def _held(layer: PromptLayer, kv_heads: int, total: int) -> torch.Tensor:
    positions = layer.positions[:, :, : layer.rows]
    b, heads, _ = positions.shape
    valid = torch.ones_like(positions) if layer.valid is None else layer.valid
    held = torch.zeros(b, heads, total, device=positions.device).scatter_(-1, positions, valid.float())
    return held.view(b, kv_heads, -1, total).mean(dim=2)
