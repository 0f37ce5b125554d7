"""The scorer of `foresightkv` in the form that is trained, and the base class of the two recipes that train it.

The scorer's inputs differ by orders of magnitude: some are elements of keys, others are sums of attention over 8 or
over thousands of queries. But the optimiser takes steps of one size for all parameters. Training therefore standardises
the inputs to mean 0 and variance 1, and divides the outputs by a constant, `unit`. The weights file holds an equivalent
scorer for raw inputs and outputs, which are neither standardised nor divided.

Letters: L layers, Hk KV heads, D inputs of the scorer per entry.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from kvbench import registry
from kvbench.engine.attention.geometry import LayerGeometry, check_evicts, for_lengths
from kvbench.engine.meta import Answers
from kvbench.engine.model.load import LoadedModel
from kvbench.engine.model.weights import model_fields
from kvbench.errors import UserError, counted
from kvbench.eviction.learned import Shapes
from kvbench.eviction.terms.foresight import COUNT, Features, scorer_shapes
from kvbench.train.foresight_states import FEATURES, WITHIN, Choice, Evictions
from kvbench.train.recipe import TRAIN_SHORTER, Settings, TraceRecipe, check_choices, check_least
from kvbench.train.traces import Trace

MEASURED = 32  # traces from which mean and standard deviation of the inputs are estimated
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


class TrainedScorer:
    """A scorer in training: it takes standardised inputs, and its outputs are divided by `unit`.

    start: initial tensors. mean, deviation: mean and standard deviation by which the inputs are standardised,
    [L, Hk, D], from `Moments.result`.
    """

    def __init__(
        self, start: Mapping[str, torch.Tensor], mean: torch.Tensor, deviation: torch.Tensor, unit: float = 1.0
    ) -> None:
        self.parameters = {
            name: tensor.detach().clone().to(mean.device).requires_grad_(True) for name, tensor in start.items()
        }
        self.mean, self.deviation, self.unit = mean, deviation, unit

    @classmethod
    def random(cls, shapes: Shapes, moments: Moments, seed: int, unit: float) -> TrainedScorer:
        """Return a randomly initialised scorer with tensors of the given shapes."""
        generator = torch.Generator().manual_seed(seed)
        inputs, hidden = shapes["w1"][-2:]
        spread = {"w1": inputs**-0.5, "w2": hidden**-0.5, "b1": 0.0, "b2": 0.0}
        start = {name: spread[name] * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        return cls(start, *moments.result(), unit)

    @classmethod
    def of(cls, scorer: Mapping[str, torch.Tensor], moments: Moments) -> TrainedScorer:
        """Convert a scorer for raw inputs and outputs into this form, so that it can be trained further."""
        trained = cls(scorer, *moments.result())
        trained.put(scorer)
        return trained

    def scorer(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the equivalent scorer for raw inputs and outputs."""
        p = self.parameters
        w1 = p["w1"] / self.deviation[..., None]
        b1 = p["b1"] - (self.mean[..., None] * w1).sum(dim=-2)
        return {"w1": w1, "b1": b1, "w2": self.unit * p["w2"], "b2": self.unit * p["b2"]}

    @torch.no_grad()
    def put(self, scorer: Mapping[str, torch.Tensor]) -> None:
        """Set the trained tensors from an equivalent scorer for raw inputs and outputs; this reverses `scorer`."""
        standardised = {
            "w1": scorer["w1"] * self.deviation[..., None],
            "b1": scorer["b1"] + (self.mean[..., None] * scorer["w1"]).sum(dim=-2),
            "w2": scorer["w2"] / self.unit,
            "b2": scorer["b2"] / self.unit,
        }
        for name, parameter in self.parameters.items():
            parameter.copy_(standardised[name])


class ScorerRecipe(TraceRecipe):
    """The base class of recipes that train a scorer (`trained`) on the evictions that happen while traces are read."""

    kind = "foresightkv"
    trained_at = ("budget", "interval", "long", "long_budget", "long_interval")
    trained: TrainedScorer

    def begin(self) -> None:
        more, given = self.settings.more, [*self.traces, *self.test]
        longest = max(len(t.ids) for t in given)
        self.check_longest(self.loaded, more, longest)
        method = registry.methods.get("foresightkv")(features=more["features"])

        def evictions(budget: int, interval: int) -> Evictions:
            sizes = {"budget": budget, "interval": interval, "longest": longest}
            return Evictions(self.loaded, method, **sizes, within=more.get("within", "mean"))

        self.evictions = self._of_long = evictions(more["budget"], more["interval"])
        if more.get("long"):
            self._of_long = evictions(more["long_budget"], more["long_interval"])
        self.traces, self.test = self._evicted(self.traces), self._evicted(self.test)
        self.too_short = len(given) - len(self.traces) - len(self.test)

    def evictions_of(self, trace: Trace) -> Evictions:
        """Return the `Evictions` that reads this trace. Its budget and interval are `long_budget` and `long_interval`
        if the option `long` is set and the trace has more than `long` tokens, else `budget` and `interval`."""
        return self._of_long if len(trace.ids) > self.settings.more.get("long", 0) else self.evictions

    @classmethod
    def check(cls, loaded: LoadedModel, more: Mapping[str, Any]) -> None:
        check_choices(more, features=FEATURES, within=WITHIN)
        check_least(more, budget=2, interval=1, long=0, long_budget=2, long_interval=1, hidden=1)
        if not more.get("margin", 1.0) > 0:
            raise UserError(f"--opt margin must be above 0; got {more['margin']:g}.")
        _check_sizes(loaded, more["features"], loaded.geometry)
        # every answer that trains has so many tokens or more, beside its prompt
        least = min(more.get("min_tokens", 0), more.get("truncate", 0) or sys.maxsize) + 1
        check_evicts(for_lengths(loaded.geometry, least), least, TRAIN_SHORTER)

    @classmethod
    def check_longest(cls, loaded: LoadedModel, more: Mapping[str, Any], longest: int) -> None:
        geometry = for_lengths(loaded.geometry, longest)
        check_evicts(geometry, longest, TRAIN_SHORTER)
        _check_sizes(loaded, more["features"], geometry)

    @classmethod
    def answers(cls, settings: Settings, longest: int) -> Answers:
        """Return the made-up values: every integer that the code reads in a rehearsal is the budget.

        A mask of n elements has n - r True ones if n is above the budget, where r is the number of newest tokens that
        the method protects. Otherwise it has as many True ones as the interval, but at most n. Budget and
        interval are `long_budget` and `long_interval` if `longest` exceeds the option `long` and `long` is not 0.
        """
        more = settings.more
        longer = "long_" if 0 < more.get("long", 0) < longest else ""
        budget, interval = more[f"{longer}budget"], more[f"{longer}interval"]
        recent = min(interval, max(1, budget // 4))

        def marked(length: int) -> int:
            return length - recent if length > budget else min(interval, length)

        return Answers(number=budget, marked=marked)

    def about_data(self) -> list[str]:
        short = f"left out: {counted(self.too_short, 'answer')} too short for an eviction"
        return [f"{short}; {len(self.traces)} train, {len(self.test)} are held out."] if self.too_short else []

    def _evicted(self, traces: Sequence[Trace]) -> list[Trace]:
        """Return those of the traces that are long enough for an eviction. Raises UserError when none is."""
        evicted = [trace for trace in traces if self.evictions_of(trace).evicts(trace)]
        if not evicted:
            raise UserError(
                "all answers to train on, or all held-out answers, are too short for an eviction at a budget of "
                f"{self.evictions.budget}. Give questions with longer answers, or a smaller --opt budget."
            )
        return evicted

    def parameters(self) -> dict[str, torch.Tensor]:
        return self.trained.parameters

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: t.detach() for name, t in self.trained.scorer().items()}

    def put(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.trained.put(tensors)

    def card(self) -> dict[str, Any]:
        recent = {"recent": self.evictions.recent, "long_recent": self._of_long.recent}
        return super().card() | recent | {"layers": self.evictions.layers}


def _check_sizes(loaded: LoadedModel, features: Features, geometry: Sequence[LayerGeometry]) -> None:
    """Raise UserError if the heads or dimensions of an evicted layer differ from those that the model's configuration
    states, because the scorer has the configuration's sizes in every layer."""
    wanted = scorer_shapes(features, model_fields(loaded.model.config))["w1"][1:3]
    for g in geometry:
        content = 0 if features == "attn" else g.head_dim + g.read_dim
        if g.evicts and (g.kv_heads, content + COUNT[features] * g.group) != wanted:
            raise UserError(
                "the scorer needs the heads that the model's configuration states in every layer, but layer "
                f"{g.index} has {counted(g.kv_heads, 'KV head')} of dimension {g.head_dim}. Choose another model."
            )
