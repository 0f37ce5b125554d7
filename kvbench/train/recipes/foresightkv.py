"""Supervised training of `foresightkv`: the scorer learns to rank entries as the oracle of golden eviction does.

Answers are read under eviction, and the oracle (`kvbench.eviction.terms.golden`) decides which entries are evicted. At
every eviction, in every layer and KV head, each competing (unprotected) entry has two numbers, phi and alpha. phi is
the scorer's output; the method drops the entries with the highest phi. alpha is the most attention that any later block
(the answer's tokens between two evictions) pays to the entry. The loss wants phi to fall as alpha rises:

    loss = sum over layers of the mean over heads and evictions of
           the mean over pairs with alpha_i < alpha_j of max(0, margin - (phi_i - phi_j))

(arXiv 2602.03203). The model is frozen, and its attention under the oracle's evictions does not depend on the scorer.
So each answer is read only once, as long as memory has room for the scorer's inputs at all evictions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch

from kvbench.engine.model.weights import model_fields
from kvbench.eviction.terms.foresight import drop_scores, scorer_shapes
from kvbench.eviction.terms.objectives import ranking_losses
from kvbench.train.foresight_scorer import MEASURED, Moments, ScorerRecipe, TrainedScorer
from kvbench.train.foresight_states import Choice
from kvbench.train.recipe import with_gradient
from kvbench.train.traces import Trace

KEPT_BYTES = 6 << 30  # most bytes of recorded evictions in memory; traces beyond are read again when a batch has them


class ForesightRecipe(ScorerRecipe):
    """Trains a scorer to drop the entries that the oracle drops.

    Agreement, the share of the oracle's dropped entries that the scorer drops too, is the main figure, because a scorer
    with small outputs has a small loss even if it ranks badly.
    """

    name, figure, higher = "foresightkv", "agreement", True
    stores = KEPT_BYTES

    def begin(self) -> None:
        super().begin()
        self._read: dict[str, list[Choice]] = {}
        self._bytes = 0
        more = self.settings.more
        shapes = scorer_shapes(more["features"], model_fields(self.loaded.model.config), more["hidden"])
        measured = Moments(shapes, (choice for trace in self.traces[:MEASURED] for choice in self._choices(trace)))
        self.trained = TrainedScorer.random(shapes, measured, self.settings.seed, unit=more["margin"])

    def loss(self, step: int, share: slice) -> tuple[torch.Tensor, dict[str, float]]:
        losses = []
        for trace in self.batch(step, share):
            loss = self._ranking(self.trained.scorer(), self._choices(trace))
            losses.append(with_gradient(loss, self.trained.parameters.values()))
        return torch.stack(losses).mean(), {}

    @torch.no_grad()
    def held_out(self) -> dict[str, float]:
        scorer = self.trained.scorer()
        losses, shares = [], []
        for trace in self.test:
            choices = self._choices(trace)
            losses.append(float(self._ranking(scorer, choices)))
            shares.append(sum(_agreement(scorer, choice) for choice in choices) / len(choices))
        return {"agreement": sum(shares) / len(shares), "loss": sum(losses) / len(losses)}

    def stored(self) -> dict[str, list[torch.Tensor]]:
        return {name: [t for choice in choices for t in _tensors(choice)] for name, choices in self._read.items()}

    @torch.no_grad()
    def rehearse_held_out(self) -> None:
        """Compute only the loss, because the agreement takes no more memory than the loss. The agreement needs the
        number of dropped entries, which meta tensors cannot give."""
        self._ranking(self.trained.scorer(), self._choices(self.test[0]))

    def _choices(self, trace: Trace) -> list[Choice]:
        """Return the oracle's evictions in a trace, sorted by layer. The model reads the trace only if its evictions
        are not in memory."""
        if trace.name in self._read:
            return self._read[trace.name]
        choices = sorted(self.evictions_of(trace).golden(trace).choices, key=lambda choice: choice.layer)
        size = sum(t.nbytes for choice in choices for t in _tensors(choice))
        if self._bytes + size <= self.stores:
            self._bytes += size
            self._read[trace.name] = choices
        return choices

    def _ranking(self, scorer: Mapping[str, torch.Tensor], choices: Sequence[Choice]) -> torch.Tensor:
        """Return the ranking loss of one trace: the sum over layers of the mean over heads and evictions."""
        total, margin = choices[0].x.new_zeros(()), self.settings.more["margin"]
        for layer, own in groupby(choices, key=lambda choice: choice.layer):
            parts = []
            for _, alike in groupby(own, key=lambda choice: choice.worth.shape):
                same = list(alike)
                phi = drop_scores(scorer, layer, torch.cat([choice.x for choice in same]))
                wanted = torch.cat([-choice.worth for choice in same])
                parts.append(ranking_losses(phi.flatten(0, 1), wanted.flatten(0, 1), margin))
            losses, counts = (torch.cat(column) for column in zip(*parts))
            total = total + losses.sum() / counts.sum().clamp_min(1)
        return total


def _tensors(choice: Choice) -> tuple[torch.Tensor, ...]:
    return choice.x, choice.worth, choice.dropped


def _agreement(scorer: Mapping[str, torch.Tensor], choice: Choice) -> float:
    """Return the share of the oracle's dropped entries that the scorer would drop too, a mean over heads."""
    count = int(choice.dropped[0, 0].sum())
    worst = drop_scores(scorer, choice.layer, choice.x).topk(count, dim=-1).indices
    return float(choice.dropped.gather(-1, worst).float().mean())
