"""Computes mean and standard deviation of the inputs of `foresightkv`'s scorer over recorded evictions."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kvbench.eviction.learned import Shapes
from kvbench.train.foresight_states import Choice

LEAST = 1e-4  # standard deviations are at least this, so that nearly constant inputs are not divided by 0


class Moments:
    """Computes mean and standard deviation of the scorer's inputs, [L, Hk, D]: L layers, Hk KV heads, D inputs.

    Evictions are added one at a time. No input is kept, because the inputs of one long answer take gigabytes. Mean and
    variance of each eviction are combined with those of earlier evictions in float64 (Chan, Golub, LeVeque 1983).

    shapes: the shapes of the scorer's tensors. choices: evictions whose inputs the constructor adds.
    """

    def __init__(self, shapes: Shapes, choices: Iterable[Choice] = ()) -> None:
        size = shapes["w1"][:-1]
        self._counts = [0] * size[0]
        self._mean, self._squares = (torch.zeros(size, dtype=torch.float64) for _ in range(2))
        for choice in choices:
            self.add(choice)

    def add(self, choice: Choice) -> None:
        """Add the inputs of one eviction in one layer."""
        layer, x = choice.layer, choice.x.transpose(0, 1).flatten(1, 2).double()  # [Hk, b * entries, D]
        self._mean, self._squares = self._mean.to(x.device), self._squares.to(x.device)
        before, more = self._counts[layer], x.shape[1]
        self._counts[layer] = before + more
        delta = x.mean(dim=1) - self._mean[layer]
        spread = x.var(dim=1, correction=0) * more
        self._squares[layer] += spread + delta.square() * (before * more / self._counts[layer])
        self._mean[layer] += delta * (more / self._counts[layer])

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and standard deviation, each [L, Hk, D]; layers without evictions have mean 0 and deviation 1."""
        seen = torch.tensor(self._counts, device=self._mean.device)[:, None, None]
        deviation = (self._squares / seen.clamp_min(1)).sqrt().clamp_min(LEAST)
        return self._mean.float(), torch.where(seen > 0, deviation, 1.0).float()
