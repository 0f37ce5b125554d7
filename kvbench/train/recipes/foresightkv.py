"""Supervised training of `foresightkv`: its scorer comes to rank entries as the oracle of golden eviction does.

An answer of the model is read as the method reads it, but the oracle decides what goes
(`kvbench.eviction.terms.golden`). At every eviction, layer and KV head, phi of the entries that compete is compared
with alpha, the most attention that any coming block will pay to each of them:

    loss = sum over layers of the mean over heads and evictions of
           the mean over pairs with alpha_i < alpha_j of max(0, margin - (phi_i - phi_j))

(arXiv 2602.03203). The model is not trained, and what it attends to at the oracle's evictions does not depend on the
scorer: an answer is read once, as long as memory holds what the scorer would have read of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from kvbench.engine.model.load import LoadedModel
from kvbench.engine.model.weights import model_fields
from kvbench.eviction.terms.foresight import drop_scores, scorer_shapes
from kvbench.eviction.terms.objectives import ranking_losses
from kvbench.train.foresight_scorer import TrainedScorer
from kvbench.train.foresight_states import Choice, batch, check_settings, evictions_of, usable
from kvbench.train.recipe import Recipe, Settings
from kvbench.train.traces import Trace

KEPT_BYTES = 6 << 30  # of readings, so that they need not be made again
MEASURED = 32  # traces that say how large inputs are


class ForesightRecipe(Recipe):
    """A scorer from traces; `settings.more`: budget, interval, features, hidden, within (of the oracle), margin.

    Held out: `loss`, and `agreement`, the share of the entries that the oracle drops which have the largest phi. The
    latter is the figure to improve: small phi alone make the loss small.
    """

    name, kind, figure, higher = "foresightkv", "foresightkv", "agreement", True

    def __init__(
        self, loaded: LoadedModel, settings: Settings, traces: Sequence[Trace], held_out: Sequence[Trace]
    ) -> None:
        super().__init__(settings)
        self.check(loaded, settings.more)
        self.evictions = evictions_of(loaded, settings, [*traces, *held_out])
        self.traces, self.test = usable(self.evictions, traces), usable(self.evictions, held_out)
        self._read: dict[str, list[Choice]] = {}
        self._bytes = 0
        shapes = scorer_shapes(settings.more["features"], model_fields(loaded.model.config), settings.more["hidden"])
        measured = [self._choices(trace) for trace in self.traces[:MEASURED]]
        self.trained = TrainedScorer.random(shapes, measured, settings.seed, unit=settings.more["margin"])

    @classmethod
    def check(cls, loaded: LoadedModel, more: Mapping[str, Any]) -> None:
        check_settings(more)

    def parameters(self) -> dict[str, torch.Tensor]:
        return self.trained.parameters

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: t.detach() for name, t in self.trained.scorer().items()}

    def loss(self, step: int, share: slice) -> tuple[torch.Tensor, dict[str, float]]:
        losses = []
        for trace in batch(self.traces, self.settings, step)[share]:
            loss = self._ranking(self.trained.scorer(), self._choices(trace))
            losses.append(self.trained.settled(loss))
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

    def card(self) -> dict[str, Any]:
        return {"traces": len(self.traces), "held_out": len(self.test), "recent": self.evictions.recent}

    def _choices(self, trace: Trace) -> list[Choice]:
        """The oracle's evictions of a trace, layer by layer."""
        if trace.name in self._read:
            return self._read[trace.name]
        choices = sorted(self.evictions.golden(trace).choices, key=lambda choice: choice.layer)
        size = sum(t.nbytes for choice in choices for t in (choice.x, choice.worth, choice.dropped))
        if self._bytes + size <= KEPT_BYTES:
            self._bytes += size
            self._read[trace.name] = choices
        return choices

    def _ranking(self, scorer: Mapping[str, torch.Tensor], choices: Sequence[Choice]) -> torch.Tensor:
        """The loss of one trace: a sum over layers of means over heads and evictions."""
        total, margin = choices[0].x.new_zeros(()), self.settings.more["margin"]
        for layer, own in groupby(choices, key=lambda choice: choice.layer):
            found = []
            for _, alike in groupby(own, key=lambda choice: choice.worth.shape):
                same = list(alike)
                phi = drop_scores(scorer, layer, torch.cat([choice.x for choice in same]))
                wanted = torch.cat([-choice.worth for choice in same])
                found.append(ranking_losses(phi.flatten(0, 1), wanted.flatten(0, 1), margin))
            losses, counts = (torch.cat(parts) for parts in zip(*found))
            total = total + losses.sum() / counts.sum().clamp_min(1)
        return total


def _agreement(scorer: Mapping[str, torch.Tensor], choice: Choice) -> float:
    """Share of the dropped entries that the largest phi would drop, over heads."""
    count = int(choice.dropped[0, 0].sum())
    worst = drop_scores(scorer, choice.layer, choice.x).topk(count, dim=-1).indices
    return float(choice.dropped.gather(-1, worst).float().mean())
