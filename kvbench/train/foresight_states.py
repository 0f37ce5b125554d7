"""Evictions as ForesightKV's scorer meets them: finished answers are read as `kvbench replay` reads them, and at every
eviction what the method itself would show its scorer is put aside, whoever decides what goes.

    evictions = Evictions(loaded, method, budget=48, interval=32, longest=400)
    led = evictions.golden(trace)                   # by the oracle
    drawn = evictions.drawn(trace, [1, 2], tensors) # by the scorer, one reading for each seed

Letters: b readings of one trace, Hk KV heads, n entries that compete, D numbers of an entry that the scorer reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from kvbench import registry
from kvbench.engine.model.load import LoadedModel
from kvbench.errors import UserError, show
from kvbench.eviction.api import Column, Method, Needs, Protect, State
from kvbench.eviction.select import decide
from kvbench.eviction.view import LayerView
from kvbench.replay.reader import Listener, TraceReader
from kvbench.replay.reference import read_full
from kvbench.replay.traces import Trace as ForcedTrace
from kvbench.train.forced import forced
from kvbench.train.recipe import Settings, drawing
from kvbench.train.traces import Trace

FEATURES, WITHIN = ("paper6", "released8"), ("mean", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One eviction of one layer."""

    layer: int
    seen: int  # tokens until then
    x: torch.Tensor  # [b, Hk, n, D]
    worth: torch.Tensor  # [b, Hk, n] what whoever decided scored them by; large ones stay
    dropped: torch.Tensor  # [b, Hk, n] bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A trace that was read b times. m tokens of its answer.

    Attributes:
        choices: its evictions, in the order in which they happened.
        losses: [b, m] of every token, in nats; entropy: [b, m].
    """

    choices: list[Choice]
    losses: torch.Tensor
    entropy: torch.Tensor


class Evictions:
    """Reads traces with a method's features and protection.

    Args:
        method: a `foresightkv`; its own weights are not looked at.
        longest: tokens of the longest trace.
        within: of the oracle, see `golden`.
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
        self.method, self.budget, self.interval, self.within = method, budget, interval, within
        self.recent = method.protect(budget).at(interval).recent
        self._choices: list[Choice] = []

        def reader(method: Method, budget: int | None) -> TraceReader:
            return TraceReader(loaded, method, budget=budget, interval=interval, max_tokens=longest)

        oracle = registry.methods.get("golden")(recent=self.recent, within=within)
        self._full = reader(registry.methods.get("full")(), None)
        self._golden = reader(_Watched(method, oracle, self._choices), budget)
        self._drawn = reader(_Watched(method, method, self._choices), budget)

    def evicts(self, trace: Trace) -> bool:
        """Whether an eviction comes before the last token of the answer."""
        last = (len(trace.answer) - 2) // self.interval * self.interval
        return len(trace.answer) > 1 and len(trace.prompt) + last > self.budget

    def full(self, trace: Trace) -> Reading:
        """The reading with the full cache."""
        return self._read(self._full, [forced(trace)], {})

    def golden(self, trace: Trace) -> Reading:
        """The reading whose evictions the oracle decides."""
        traces = [forced(trace)]
        reference = read_full(self._full, traces, extreme=self.within == "max")
        return self._read(self._golden, traces, reference.future())

    def drawn(self, trace: Trace, seeds: Sequence[int], scorer: Mapping[str, torch.Tensor]) -> Reading:
        """Readings whose evictions the method decides with this scorer, one for each seed of its draws."""
        weights = {name: tensor.detach() for name, tensor in scorer.items()}
        return self._read(self._drawn, [forced(trace, seed) for seed in seeds], weights)

    def _read(self, reader: TraceReader, traces: list[ForcedTrace], weights: Mapping[str, torch.Tensor]) -> Reading:
        self._choices.clear()
        heard = _Predictions(torch.tensor([t.answer for t in traces], device=reader.loaded.device))
        reader.read(traces, heard, weights)
        # Tensors of a reading come from inference mode; autograd takes their copies.
        return Reading(
            choices=[_copied(choice) for choice in self._choices],
            losses=torch.cat(heard.losses, dim=1).clone(),
            entropy=torch.cat(heard.entropy, dim=1).clone(),
        )


@dataclass(frozen=True)
class _Watched(Method):
    """`scorer` as it is, but `judge` decides what goes; `choices` is told."""

    scorer: Any
    judge: Any
    choices: list[Choice]

    def __post_init__(self) -> None:
        pass  # these are no options

    def needs(self) -> Needs:
        needs: Needs = self.scorer.needs()
        return needs

    def columns(self) -> tuple[Column, ...]:
        columns: tuple[Column, ...] = self.scorer.columns()
        return columns

    def states(self) -> tuple[State, ...]:
        states: tuple[State, ...] = self.scorer.states()
        return states

    def protect(self, budget: int) -> Protect:
        protect: Protect = self.scorer.protect(budget)
        return protect

    def observe(self, view: LayerView) -> dict[str, torch.Tensor]:
        values: dict[str, torch.Tensor] = self.scorer.observe(view)
        return values

    def score(self, view: LayerView) -> torch.Tensor:
        """1 for what the judge keeps, 0 for what it drops."""
        keep = decide(self.judge, [view])[0].keep
        competes = self.scorer.competing(view)  # equally many in every head: the newest are held by all
        b, heads, _ = competes.shape

        def among(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[competes].unflatten(0, (b, heads, -1))

        self.choices.append(
            Choice(
                layer=view.layer,
                seen=int(view.seen[0]),
                x=among(self.scorer.inputs(view)),
                worth=among(self.judge.score(view)),
                dropped=among(~keep),
            )
        )
        return keep.float()


@dataclass(slots=True)
class _Predictions(Listener):
    """Listens to a reading: losses and entropy of every token of the answers [b, m]."""

    targets: torch.Tensor
    losses: list[torch.Tensor] = field(default_factory=list)
    entropy: list[torch.Tensor] = field(default_factory=list)

    def predicted(self, first: int, logits: torch.Tensor) -> None:
        found = logits.double().log_softmax(dim=-1)
        target = self.targets[:, first : first + logits.shape[1], None]
        self.losses.append(-found.gather(-1, target)[..., 0])
        self.entropy.append(torch.special.entr(found.exp()).sum(dim=-1))


def _copied(choice: Choice) -> Choice:
    return replace(choice, x=choice.x.clone(), worth=choice.worth.clone(), dropped=choice.dropped.clone())


def usable(evictions: Evictions, traces: Sequence[Trace]) -> list[Trace]:
    """The traces in which something is evicted. Raises UserError when there is none."""
    found = [trace for trace in traces if evictions.evicts(trace)]
    if not found:
        raise UserError(
            f"no answer to train on outgrows a budget of {evictions.budget} in time; "
            "the model answered nothing rightly, or its answers are too short."
        )
    return found


def check_settings(more: Mapping[str, Any]) -> None:
    """Raises UserError for settings that are none."""
    for name, values in (("features", FEATURES), ("within", WITHIN)):
        if more.get(name, values[0]) not in values:
            raise UserError(f"--opt {name} must be {' or '.join(values)}; got {show(more[name])}.")
    for name, least in (("budget", 2), ("interval", 1), ("hidden", 1)):
        if more.get(name, least) < least:
            raise UserError(f"--opt {name} must be {least} or more; got {more[name]}.")
    if not more.get("margin", 1.0) > 0:
        raise UserError(f"--opt margin must be above 0; got {more['margin']:g}.")


def evictions_of(loaded: LoadedModel, settings: Settings, traces: Sequence[Trace]) -> Evictions:
    """What reads the traces of a training."""
    more = settings.more
    loaded.model.requires_grad_(False)
    method = registry.methods.get("foresightkv")(features=more["features"])
    longest = max((len(trace.ids) for trace in traces), default=1)
    within = more.get("within", "mean")
    return Evictions(loaded, method, budget=more["budget"], interval=more["interval"], longest=longest, within=within)


def batch(traces: Sequence[Trace], settings: Settings, step: int) -> list[Trace]:
    """The traces of a step."""
    generator = drawing(settings.seed, step)
    return [traces[i] for i in torch.randint(0, len(traces), (settings.batch,), generator=generator).tolist()]
