"""`gkv-distill`: the model under eviction learns to predict as the original does with a full cache.

Every step simulates the eviction of some of the model's own right answers with the current weights and lowers

    T^2 KL( softmax(z_full / T)  ||  softmax(z_sparse / T) )      a token of these answers

where z_full are the logits of the frozen original and z_sparse those of the model that learns, under the masks that
the eviction left (G-KV, arXiv 2512.00504). What the eviction chooses has no gradient.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from kvbench.engine.model.load import LoadedModel
from kvbench.eviction import noise
from kvbench.replay.reader import Listener, TraceReader
from kvbench.replay.traces import Trace as Replayed
from kvbench.train.forced import forced
from kvbench.train.gkv import SparseRecipe
from kvbench.train.recipe import Settings
from kvbench.train.sparse_masks import Lifetimes
from kvbench.train.sparse_pass import Answered, Part, add_up
from kvbench.train.traces import Question, Trace


class DistillRecipe(SparseRecipe):
    """A model that was its own teacher."""

    name = "gkv-distill"

    def __init__(
        self, loaded: LoadedModel, settings: Settings, traces: Sequence[Trace], test: Sequence[Question]
    ) -> None:
        self.teacher = copy.deepcopy(loaded.model).requires_grad_(False)
        super().__init__(loaded, settings, test)
        self.traces = traces
        self.lifetimes = Lifetimes()
        self.reader = TraceReader(
            self.loaded,
            self.method,
            budget=self.budget,
            interval=self.interval,
            max_tokens=max(len(t.ids) for t in traces),
            log=self.lifetimes,
        )

    def loss(self, step: int, share: slice) -> tuple[torch.Tensor, dict[str, float]]:
        batch = [self.traces[i] for i in self.drawn(step, len(self.traces))]
        mine = batch[share]
        # A mean over the tokens of the whole batch, also where processes have unequal parts of it.
        tokens = sum(len(t.answer) for t in batch) * len(mine) / len(batch)
        answered = self.simulate(mine, weight=self.temperature**2 / tokens)
        return add_up(
            self.loaded.model, answered, self.lifetimes, self._divergence, micro=self.micro, again=self.again
        ), {}

    def card(self) -> dict[str, Any]:
        return super().card() | {"traces": len(self.traces)}

    def simulate(self, traces: Sequence[Trace], weight: float = 1.0) -> list[Answered]:
        """Read answers with the evicting cache and the current weights; `lifetimes` then knows what it held."""
        self.lifetimes.clear()
        groups: dict[tuple[int, int], dict[str, Replayed]] = defaultdict(dict)
        answered = []
        for trace in traces:  # one that a batch has twice is read once
            answer = forced(trace)
            groups[len(trace.prompt), len(trace.answer)][trace.name] = answer
            keys = noise.signed64(answer.request.noise_key(-1)), noise.signed64(answer.request.noise_key(0))
            answered.append(Answered(prompt=trace.prompt, answer=trace.answer, keys=keys, weight=weight))
        for group in (list(found.values()) for found in groups.values()):
            size = self.micro if self.reader.together else 1
            for start in range(0, len(group), size):
                self.reader.read(group[start : start + size], _Nobody())
        return answered

    def _divergence(self, logits: torch.Tensor, part: Part) -> torch.Tensor:
        with torch.no_grad():
            wanted = (part.logits(self.teacher, {}) / self.temperature).log_softmax(dim=-1)
        said = (logits / self.temperature).log_softmax(dim=-1)
        divergence = (wanted.exp() * (wanted - said)).sum(dim=-1)  # [b, n]
        return (divergence * part.weights).sum()


class _Nobody(Listener):
    """Listens to nothing of a reading but its evictions, which are logged."""
