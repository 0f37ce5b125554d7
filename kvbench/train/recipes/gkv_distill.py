"""`gkv-distill`: the model with an evicted cache learns to predict as the original model does with the full cache.

In every step, the model with its current weights reads answers under eviction. The answers come from the data, or the
original model generated them with the full cache (by default only right ones are used). The step lowers the loss

    T^2 KL( softmax(z_full / T)  ||  softmax(z_sparse / T) )      per token of these answers

(G-KV, arXiv 2512.00504). z_full are the logits of the frozen original model. z_sparse are the logits of the trained
model under masks that reproduce the evictions. No gradient reaches the choice of the entries to evict.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from kvbench.engine.model.load import LoadedModel
from kvbench.errors import UserError, quote
from kvbench.eviction import choose, noise
from kvbench.replay.reader import Listener, TraceReader
from kvbench.replay.traces import ForcedTrace
from kvbench.train.gkv import SparseRecipe
from kvbench.train.recipe import Settings
from kvbench.train.sparse_pass import Answered, Teacher, add_up
from kvbench.train.traces import Question, Trace


class DistillRecipe(SparseRecipe):
    """Trains the model to predict with an evicted cache what the original model predicts with the full cache."""

    name, softness = "gkv-distill", "kl_temperature"

    def __init__(
        self, loaded: LoadedModel, settings: Settings, traces: Sequence[Trace], test: Sequence[Question]
    ) -> None:
        original = None if settings.more["lora"] else copy.deepcopy(loaded.model).requires_grad_(False)
        super().__init__(loaded, settings, test)
        # With an adapter no copy of the original is needed: it is the model with its adapter switched off.
        self.teacher: Teacher = self.adapter.switched_off if self.adapter else partial(nullcontext, original)
        self.traces, longest = traces, max(len(t.ids) for t in traces)
        self.check_longest(loaded, settings.more, longest)
        self.reader = TraceReader(
            self.loaded,
            self.method,
            budget=self.budget,
            interval=self.interval,
            max_tokens=longest,
            log=self.lifetimes,
        )

    @classmethod
    def check(cls, loaded: LoadedModel, more: Mapping[str, Any]) -> None:
        super().check(loaded, more)
        if not choose.from_label(str(more["method"])).evicts:
            raise UserError(
                f"method {quote(more['method'])} evicts nothing, so {cls.name} has nothing to train. Give another "
                "method with --opt method=NAME."
            )

    def about_data(self) -> list[str]:
        whole = self.fitting([(len(t.prompt), len(t.ids)) for t in self.traces], "prompt with its answer")
        each = (
            f"{whole} of {len(self.traces)} answers train nothing: prompt and answer together fit into the budget, so "
            "nothing is evicted."
        )
        return [each] if whole else []

    def loss(self, step: int, share: slice) -> tuple[torch.Tensor, dict[str, float]]:
        batch = self.draw(self.traces, step)
        mine = batch[share]
        # The losses of the processes are averaged; with this divisor, they average to the mean over the batch's tokens.
        tokens = sum(len(t.answer) for t in batch) * len(mine) / len(batch)
        answered = self.simulate(mine, weight=self.temperature**2 / tokens)
        loss = add_up(
            self.loaded.model,
            answered,
            self.lifetimes,
            self._divergence,
            micro=self.micro,
            again=self.again,
            teacher=self.teacher,
        )
        return loss, {}

    def card(self) -> dict[str, Any]:
        return super().card() | {"traces": len(self.traces)}

    def simulate(self, traces: Sequence[Trace], weight: float = 1.0) -> list[Answered]:
        """Read answers under eviction with the current weights, and log the evictions in `lifetimes`. Return the
        answers in the form that the loss takes. weight: the weight of each of their tokens in the loss."""
        self.lifetimes.clear()
        groups: dict[tuple[int, int], dict[str, ForcedTrace]] = defaultdict(dict)
        answered = []
        for trace in traces:  # the groups hold a trace once, even if the batch has it twice
            answer = trace.forced()
            groups[len(trace.prompt), len(trace.answer)][trace.name] = answer
            keys = noise.signed64(answer.request.noise_key(-1)), noise.signed64(answer.request.noise_key(0))
            answered.append(Answered(prompt=trace.prompt, answer=trace.answer, keys=keys, weight=weight))
        size = self.micro if self.reader.together else 1
        for group in (list(traces_by_name.values()) for traces_by_name in groups.values()):
            for start in range(0, len(group), size):
                self.reader.read(group[start : start + size], Listener())  # the log of evictions is enough
        return answered

    def _divergence(self, logits: torch.Tensor, targets: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        wanted = (wanted / self.temperature).log_softmax(dim=-1)
        learned = (logits / self.temperature).log_softmax(dim=-1)
        return (wanted.exp() * (wanted - learned)).sum(dim=-1)
