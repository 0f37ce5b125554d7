"""The scorer of `foresightkv` while it is trained.

What it reads of an entry differs in size by orders of magnitude: numbers of keys, sums of attention over 8 queries or
over thousands. A step of the optimiser is of one size for all, so the first layer is trained on inputs that were
brought to mean 0 and variance 1, and the last one answers in a unit that is given. What is written reads inputs as they
are and answers in numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvbench.eviction.learned import Shapes
from kvbench.train.foresight_states import Choice

LEAST = 1e-4  # deviation of an input that is all but constant


class TrainedScorer:
    """Trained tensors, and the scorer that they are.

    Args:
        start: tensors of a scorer of standardised inputs that answers in units.
        mean, deviation: [L, Hk, D] of the inputs.
        unit: of the answers.
    """

    def __init__(
        self, start: Mapping[str, torch.Tensor], mean: torch.Tensor, deviation: torch.Tensor, unit: float = 1.0
    ) -> None:
        self.parameters = {
            name: tensor.detach().clone().to(mean.device).requires_grad_(True) for name, tensor in start.items()
        }
        self.mean, self.deviation, self.unit = mean, deviation, unit

    @classmethod
    def random(cls, shapes: Shapes, readings: Sequence[Sequence[Choice]], seed: int, unit: float) -> TrainedScorer:
        """One that nothing was learned by, for inputs of the size of these."""
        generator = torch.Generator().manual_seed(seed)
        inputs, hidden = shapes["w1"][-2:]
        spread = {"w1": inputs**-0.5, "w2": hidden**-0.5, "b1": 0.0, "b2": 0.0}
        start = {name: spread[name] * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        return cls(start, *moments(shapes, readings), unit)

    @classmethod
    def of(cls, scorer: Mapping[str, torch.Tensor], readings: Sequence[Sequence[Choice]]) -> TrainedScorer:
        """A scorer that was written, to be trained on."""
        mean, deviation = moments({name: tuple(t.shape) for name, t in scorer.items()}, readings)
        start = dict(scorer) | {
            "w1": scorer["w1"] * deviation[..., None],
            "b1": scorer["b1"] + (mean[..., None] * scorer["w1"]).sum(dim=-2),
        }
        return cls(start, mean, deviation)

    def scorer(self) -> dict[str, torch.Tensor]:
        """The scorer of inputs as they are."""
        p = self.parameters
        w1 = p["w1"] / self.deviation[..., None]
        b1 = p["b1"] - (self.mean[..., None] * w1).sum(dim=-2)
        return {"w1": w1, "b1": b1, "w2": self.unit * p["w2"], "b2": self.unit * p["b2"]}

    def settled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss with its gradient, but without all that it was computed from: one trace is in memory at a time."""
        slopes = torch.autograd.grad(loss, list(self.parameters.values()), allow_unused=True)
        pull = [((p - p.detach()) * s).sum() for p, s in zip(self.parameters.values(), slopes) if s is not None]
        return loss.detach() + torch.stack(pull).sum()


def moments(shapes: Shapes, readings: Sequence[Sequence[Choice]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation [L, Hk, D] of what the scorers read; 0 and 1 in layers that evict nothing."""
    every = [choice for choices in readings for choice in choices]
    mean, deviation = (every[0].x.new_full(shapes["w1"][:-1], value) for value in (0.0, 1.0))
    for layer in {choice.layer for choice in every}:
        x = torch.cat([c.x.transpose(0, 1).flatten(1, 2) for c in every if c.layer == layer], dim=1)
        mean[layer], deviation[layer] = x.mean(dim=1), x.std(dim=1, correction=0).clamp_min(LEAST)
    return mean, deviation
