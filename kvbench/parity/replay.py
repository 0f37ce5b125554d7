"""Run parity cases through the rulebook, the real `Method` and `keep_mask`, and compare the kept sets.

Runs freely: our own sets and columns carry from step to step. Only after a step that differs from the reference do
later ones start from its state (teacher forcing), because max pooling makes exact ties, and which of the tied survive
is nobody's rule.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from kvbench.eviction.api import Method
from kvbench.eviction.select import decide
from kvbench.eviction.slots import RANK
from kvbench.eviction.view import LayerView, make_view
from kvbench.lazy import torch
from kvbench.parity.cases import Case
from kvbench.parity.variants import Plan
from kvbench.registry import methods

TIE = 1e-5  # scores closer than this share of the median score count as tied


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One decision of all units of a case."""

    step: int
    forced: bool  # started from the reference's state
    min_overlap: float
    mean_overlap: float
    exact: float  # share of units with the same set
    equal: float  # share of units with the same set up to ties


class ReferenceCache:
    """The smallest cache that can run a method: the file's layers are the batch, every head holds the same number."""

    def __init__(self, case: Case, plan: Plan, method: Method) -> None:
        self.plan, self.method = plan, method
        self.q, self.k = case.tensors.get("q"), case.tensors.get("k")  # [L, Hq, T, d], [L, H, T, d]
        self.positions = torch.empty(case.layers, case.heads, 0, dtype=torch.int64)  # [L, H, N]
        self.columns = {c.name: torch.empty(case.layers, case.heads, 0) for c in method.columns()}
        self.seen = 0
        self.observed = 0  # queries handed to observe()

    def load(self, case: Case, step: int) -> None:
        """Take over the slots and states that the reference had before a step."""
        self.positions, self.seen = case.slots(step), case.seen[step]
        self.observed = 0 if step == 0 else self.seen
        for column in self.method.columns():
            state = case.state(self.plan.states.get(column.name, ""), step)
            if column.name == RANK.name and step:
                state = torch.arange(self.positions.shape[-1]).expand_as(self.positions).float()
            values = torch.full(self.positions.shape, column.init)
            if state is not None:
                values[..., : state.shape[-1]] = state
                self.observed = self.seen - (self.positions.shape[-1] - state.shape[-1])
            self.columns[column.name] = values

    def append(self, seen: int) -> None:
        """Let tokens arrive until `seen` have."""
        first = self.seen == 0
        new = torch.arange(self.seen, seen).expand(*self.positions.shape[:2], -1)
        self.positions, self.seen = torch.cat([self.positions, new], dim=-1), seen
        for column in self.method.columns():
            values = torch.full(new.shape, column.init)
            self.columns[column.name] = torch.cat([self.columns[column.name], values], dim=-1)
        if first and self.method.needs().queries == "since_last":
            self._observe()
        if first and self.plan.prompt_memory:
            self.columns["memory"] = self._view(0).attend(reduce_g="max", reduce_q="sum")

    def evict(self) -> None:
        """What an engine does at an eviction."""
        held, budget = self.positions.shape[-1], self.plan.budget
        if not self.method.trigger(1).full(held, budget):
            return
        needs = self.method.needs()
        if needs.queries == "since_last":
            self._observe()
        newest = {"none": 0, "last": 1, "window": needs.window, "since_last": 0}[needs.queries]
        keep, columns = decide(self.method, self._view(max(0, self.seen - newest)))
        self.columns.update(columns)
        shape = self.positions.shape[:2]
        self.columns = {name: values[keep].view(*shape, -1) for name, values in self.columns.items()}
        self.positions = self.positions[keep].view(*shape, -1)

    def kept(self) -> list[set[int]]:
        return [set(unit.tolist()) for unit in self.positions.flatten(0, 1)]

    def _observe(self) -> None:
        self.columns.update(self.method.observe(self._view(self.observed)))
        self.observed = self.seen

    def _view(self, first_query: int) -> LayerView:
        """The cache with the queries from `first_query` on."""
        queries = None
        if self.k is None:  # only positions count
            keys = torch.zeros(*self.positions.shape, 1)
        else:
            keys = self.k.gather(2, self.positions[..., None].expand(-1, -1, -1, self.k.shape[-1]))
            queries = None if self.q is None else self.q[:, :, first_query : self.seen]
        budget, columns = self.plan.budget, self.columns
        return make_view(keys, queries, budget=budget, positions=self.positions, columns=columns, seen=self.seen)


def replay(case: Case, plan: Plan) -> list[StepResult]:
    """Run one case by one plan; one result for every stored step that the plan judges."""
    method: Method = methods.get(plan.method)(**plan.options)
    cache = ReferenceCache(case, plan, method)
    results = []
    forced = plan.sorted_steps
    for step, seen in enumerate(case.seen):
        if plan.sorted_steps and not case.in_text_order(step):
            continue
        if forced:
            cache.load(case, step)
            cache.evict()
        elif plan.every_token and step:
            for token in range(cache.seen, seen):
                cache.append(token + 1)
                cache.evict()
        else:
            cache.append(seen)
            cache.evict()
        results.append(_compare(case, step, forced, cache.kept()))
        forced = forced or results[-1].exact < 1
    return results


def _compare(case: Case, step: int, forced: bool, got: list[set[int]]) -> StepResult:
    want, scores = case.kept(step), case.scores(step)
    overlaps = [len(a & b) / len(a | b) if a | b else 1.0 for a, b in zip(got, want)]
    equal = [tied(a, b, None if scores is None else scores[u]) for u, (a, b) in enumerate(zip(got, want))]
    return StepResult(
        step=step,
        forced=forced,
        min_overlap=min(overlaps),
        mean_overlap=statistics.fmean(overlaps),
        exact=sum(a == b for a, b in zip(got, want)) / len(want),
        equal=sum(equal) / len(want),
    )


def tied(got: set[int], want: set[int], scores: dict[int, float] | None) -> bool:
    """Whether two sets differ at most by exchanging tokens whose reference scores tie at the cut."""
    swapped = got ^ want
    if not swapped:
        return True
    if scores is None or len(got) != len(want) or not swapped <= scores.keys():
        return False
    cut = min(scores[token] for token in want if token in scores)
    # torch's median, the lower of the two middle values, as the format's description has it
    tolerance = TIE * max(statistics.median_low(abs(s) for s in scores.values()), 1e-12)
    return all(abs(scores[token] - cut) <= tolerance for token in swapped)
