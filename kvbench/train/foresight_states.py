"""Records the inputs of ForesightKV's scorer at every eviction while a trace is read.

Either the oracle `golden` or the scorer decides which entries are evicted. The trace is read as `kvbench replay` reads
it, and the code of the method `foresightkv` computes the scorer's inputs.

Letters: b readings of one trace, Hk KV heads, n competing (unprotected) entries, D inputs of the scorer per entry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from kvbench import registry
from kvbench.engine.model.load import LoadedModel
from kvbench.eviction.api import Method
from kvbench.eviction.select import decide
from kvbench.eviction.terms.foresight import Features
from kvbench.eviction.view import LayerView
from kvbench.replay.reader import Listener, TraceReader
from kvbench.replay.reference import read_future
from kvbench.replay.traces import ForcedTrace
from kvbench.train.logits import PREDICTIONS
from kvbench.train.traces import Trace

FEATURES, WITHIN = get_args(Features), ("mean", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One eviction in one layer: the scorer's inputs, the scores that decided, and which entries were dropped."""

    layer: int
    seen: int  # tokens read before the eviction
    x: torch.Tensor  # [b, Hk, n, D]
    worth: torch.Tensor  # [b, Hk, n] scores of the method that decided; it keeps entries with higher scores
    dropped: torch.Tensor  # [b, Hk, n] bool


Take = Callable[[Choice], None]  # called with each layer's eviction, outside inference mode


def ignore(choice: Choice) -> None:
    """Do nothing with an eviction. `Evictions` passes evictions to this function while it records no reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReading:
    """The record of reading one trace b times: the evictions, and loss and entropy of each of the m answer tokens."""

    choices: list[Choice]  # in the order in which they happened, layer by layer; empty if a `Take` received them
    unevicted: int  # tokens read before the first eviction
    losses: torch.Tensor  # [b, m] in nats
    entropy: torch.Tensor  # [b, m] of the model's prediction, in nats


class Evictions:
    """Reads traces under eviction; records the scorer's inputs and the decision at every eviction.

    method: the method `foresightkv` without weights; its options set the scorer's features and the protected entries.
    longest: tokens of the longest trace. within: the oracle's option of this name, see `methods/golden.py`. The
    attribute `layers` has the layers from which entries are evicted.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        method: Any,
        *,
        budget: int,
        interval: int,
        longest: int,
        within: Literal["mean", "max"] = "mean",
    ) -> None:
        self.budget, self.interval, self.within = budget, interval, within
        self.recent = method.protect(budget).at(interval).recent
        self._take: Take = ignore

        def reader(method: Method, budget: int | None) -> TraceReader:
            return TraceReader(loaded, method, budget=budget, interval=interval, max_tokens=longest)

        oracle = registry.methods.get("golden")(recent=self.recent, within=within)
        self._full = reader(registry.methods.get("full")(), None)
        self._golden = reader(_Watched(method, oracle, self._taken), budget)
        self.layers = [g.index for g in self._golden.setup.geometry if g.evicts]
        self._drawn = reader(_Watched(method, method, self._taken), budget)

    def evicts(self, trace: Trace) -> bool:
        """Return whether an eviction comes before the last token of the trace's answer."""
        last = (len(trace.answer) - 2) // self.interval * self.interval
        return len(trace.answer) > 1 and len(trace.prompt) + last > self.budget

    def full(self, trace: Trace) -> TraceReading:
        """Read the trace with the full cache; return the record of this reading, in which nothing is evicted."""
        return self._read(self._full, [trace.forced()], {})

    def golden(self, trace: Trace, take: Take | None = None) -> TraceReading:
        """Read the trace while the oracle `golden` evicts; return the record of the reading. take: as in `drawn`."""
        traces = [trace.forced()]
        return self._read(self._golden, traces, read_future(self._full, traces, extreme=self.within == "max"), take)

    def drawn(
        self, trace: Trace, seeds: Sequence[int], scorer: Mapping[str, torch.Tensor], take: Take | None = None
    ) -> TraceReading:
        """Read the trace once per seed while `foresightkv` evicts; return one record of all readings.

        The evicted entries are drawn at random, with probabilities that depend on the outputs of `scorer`.

        take: called with each eviction; the record then keeps no evictions.
        """
        weights = {name: tensor.detach() for name, tensor in scorer.items()}
        return self._read(self._drawn, [trace.forced(seed) for seed in seeds], weights, take)

    def _read(
        self,
        reader: TraceReader,
        traces: list[ForcedTrace],
        weights: Mapping[str, torch.Tensor],
        take: Take | None = None,
    ) -> TraceReading:
        choices: list[Choice] = []
        seen = [len(traces[0].prompt) + len(traces[0].answer)]

        def receive(choice: Choice) -> None:
            seen.append(choice.seen)
            (take or choices.append)(choice)

        predictions = _Predictions(torch.tensor([t.answer for t in traces], device=reader.loaded.device))
        self._take = receive
        try:
            reader.read(traces, predictions, weights)
        finally:
            self._take = ignore
        # The figures are inference tensors, which autograd rejects; it accepts their copies.
        losses, entropy = (torch.cat(parts, dim=1).clone() for parts in (predictions.losses, predictions.entropy))
        return TraceReading(choices=choices, unevicted=min(seen), losses=losses, entropy=entropy)

    def _taken(self, choice: Choice) -> None:
        self._take(choice)


@dataclass(frozen=True)
class _Watched(Method):
    """A method whose evictions another method decides; it passes each decision and the scorer's inputs to `take`.

    scorer: the method `foresightkv`, whose columns and states the engine collects. judge: the method that decides.
    """

    scorer: Any
    judge: Any
    take: Take

    def __post_init__(self) -> None:
        for name in ("needs", "columns", "states", "protect", "observe"):
            object.__setattr__(self, name, getattr(self.scorer, name))

    def score(self, view: LayerView) -> torch.Tensor:
        """Pass the judge's decision to `take`; return 1 for entries that the judge keeps, 0 for others."""
        keep = decide(self.judge, [view])[0].keep
        # Every head has equally many competing entries, because every head holds the newest, protected tokens.
        competes = self.scorer.competing(view)
        b, heads, _ = competes.shape

        def among(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[competes].unflatten(0, (b, heads, -1))

        inputs, worth = self.scorer.inputs(view), self.judge.score(view)
        with torch.inference_mode(False):  # autograd does not accept tensors made in inference mode
            x, worth, dropped = map(among, (inputs, worth, ~keep))
            self.take(Choice(layer=view.layer, seen=int(view.seen[0]), x=x, worth=worth, dropped=dropped))
        return keep.float()


@dataclass(slots=True)
class _Predictions(Listener):
    """Collects loss and entropy, [b, m] for b readings and m answer tokens, while traces are read."""

    targets: torch.Tensor
    losses: list[torch.Tensor] = field(default_factory=list)
    entropy: list[torch.Tensor] = field(default_factory=list)

    def predicted(self, first: int, logits: torch.Tensor) -> None:
        rows = max(1, PREDICTIONS // len(logits))
        for start in range(0, logits.shape[1], rows):  # float64 takes much memory: convert a few positions at a time
            log_probs = logits[:, start : start + rows].double().log_softmax(dim=-1)
            target = self.targets[:, first + start : first + start + log_probs.shape[1], None]
            self.losses.append(-log_probs.gather(-1, target)[..., 0])
            self.entropy.append(torch.special.entr(log_probs.exp()).sum(dim=-1))
