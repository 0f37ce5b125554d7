"""Runs parity cases with kvbench's methods, and compares the entries that they keep with those of the reference.

The engine's own `decide` takes the decisions. kvbench's kept entries and columns carry over from step to step. Once
kvbench keeps other entries than the reference, every later step starts from the reference's state (teacher forcing).
If the plan compares only some steps (`steps`, `sorted_steps`), every step starts from the reference's state. A
difference need not be an error: max pooling makes exact ties, which the reference breaks arbitrarily.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields

from kvbench.audit.parity.cases import Case
from kvbench.audit.parity.variants import CasePlan
from kvbench.eviction.api import Column, Method
from kvbench.eviction.choose import make
from kvbench.eviction.columns import expanded
from kvbench.eviction.select import decide
from kvbench.eviction.terms.rkv_slot_order import RANK
from kvbench.eviction.view import LayerView, make_view
from kvbench.lazy import torch

TIE = 1e-5  # scores closer than this share of the median score count as tied

Watch = Callable[[int, list[LayerView]], None]  # (step, views of all layers), called right before each eviction


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """How far kvbench and the reference keep the same entries at one step, over all units (heads) of a case."""

    step: int
    forced: bool  # started from the reference's state
    min_overlap: float
    mean_overlap: float
    exact: float  # share of units with the same set
    equal: float  # share of units with the same set up to ties


@dataclass(slots=True, kw_only=True)
class DrawnView(LayerView):
    """A view whose method `noise` returns the given random numbers `drawn`. The `noise` of other views computes a
    hash."""

    drawn: torch.Tensor  # [1, H, N]

    def noise(self) -> torch.Tensor:
        return self.drawn


class ReferenceLayer:
    """The entries of one layer, without keys and values: their positions, the mask `valid`, columns and states.

    Positions have the shape [1, heads, entries]. All heads are padded to the length of the longest. initial: for some
    columns, by name, the value with which the column starts for each token, [heads, tokens]. Every other column starts
    with its own constant, `Column.init`.
    """

    def __init__(self, heads: int, group: int, method: Method, initial: Mapping[str, torch.Tensor]) -> None:
        self.specs, self.initial = expanded(method.columns(), group), initial
        self.columns: dict[str, torch.Tensor] = {}
        self.states: dict[str, torch.Tensor] = {}
        self.take([torch.empty(0, dtype=torch.int64)] * heads, {})

    def take(self, rows: list[torch.Tensor], columns: dict[str, list[torch.Tensor]]) -> None:
        """Replace all entries by entries at the positions `rows`, one tensor per head. columns: by column name, known
        values for the first entries of each head; all other entries get the values with which the column starts."""
        pad = torch.nn.utils.rnn.pad_sequence
        self.positions = pad(rows, batch_first=True, padding_value=-1)[None]
        self.valid = self.positions >= 0
        for column in self.specs:
            values = self._new(column, self.positions)
            for head, known in enumerate(columns.get(column.name, [])):
                values[0, head, : len(known)] = known
            self.columns[column.name] = values

    def append(self, first: int, seen: int) -> None:
        new = torch.arange(first, seen).expand(1, self.positions.shape[1], -1)
        self.positions = torch.cat([self.positions, new], dim=-1)
        self.valid = torch.cat([self.valid, torch.ones_like(new, dtype=torch.bool)], dim=-1)
        for column in self.specs:
            values = self._new(column, new)
            self.columns[column.name] = torch.cat([self.columns[column.name], values], dim=-1)

    def _new(self, column: Column, positions: torch.Tensor) -> torch.Tensor:
        """Return the values with which a column starts for tokens at positions [1, H, n]."""
        if column.name not in self.initial:
            return torch.full(positions.shape, column.init)
        return self.initial[column.name].gather(-1, positions[0].clamp(min=0))[None]

    def update(self, values: dict[str, torch.Tensor]) -> None:
        """Store new values of columns and states, by name."""
        for name, tensor in values.items():
            (self.columns if name in self.columns else self.states)[name] = tensor

    def keep(self, mask: torch.Tensor) -> None:
        heads = range(mask.shape[1])
        columns = {name: [c[0, h][mask[0, h]] for h in heads] for name, c in self.columns.items()}
        self.take([self.positions[0, h][mask[0, h]] for h in heads], columns)

    def kept(self) -> list[set[int]]:
        return [set(row[exists].tolist()) for row, exists in zip(self.positions[0], self.valid[0])]


class ReferenceCache:
    """A minimal cache that lets a method evict from the layers of a parity case."""

    def __init__(self, case: Case, plan: CasePlan, method: Method, watch: Watch | None = None) -> None:
        self.plan, self.method, self.heads, self.watch = plan, method, case.heads, watch
        self.case, self.step = case, 0
        q, k, v = (case.tensors.get(name) for name in ("q", "k", "v"))  # [L, H, T, d]
        if q is not None and plan.rope is not None:  # the file holds queries before rotation
            q = plan.rope.rotate(q, torch.arange(q.shape[2]))
        self.q, self.k, self.v = q, self._per_unit(k), self._per_unit(v)
        self.group = 1 if q is None else q.shape[1] // case.heads
        initial = [{name: values[layer] for name, values in plan.initial.items()} for layer in range(case.layers)]
        self.layers = [ReferenceLayer(case.heads, self.group, method, own) for own in initial]
        for layer in self.layers:
            for state in method.states():
                sizes = {"kv_heads": case.heads}
                if q is not None:
                    sizes |= {"query_heads": q.shape[1], "head_dim": q.shape[3]}
                shape = [sizes[size] if isinstance(size, str) else size for size in state.shape]
                layer.states[state.name] = torch.zeros(1, *shape)
        self.seen = 0
        self.prompt_len = plan.prompt_len or case.seen[0]
        self.observed = 0  # queries handed to observe()
        self.evictions = 0

    def _per_unit(self, x: torch.Tensor | None) -> torch.Tensor | None:
        """Return keys or values with one head per unit of the case. If the units are query heads, the keys or values of
        each KV head are repeated for its query heads. None stays None."""
        return x if x is None else x.repeat_interleave(self.heads // x.shape[1], dim=1)

    def load(self) -> None:
        """Replace all entries by those that the reference held before `self.step`, with the columns in the file.

        All other columns get the values with which they start, except `RANK`: from the second step on, it is the order
        in which the file stores the entries. States are replaced only if the plan has `resume`.
        """
        step = self.step
        slots, self.seen = self.case.slots(step), self.case.seen[step]
        self.observed = 0 if step == 0 else self.seen
        for index, layer in enumerate(self.layers):
            columns: dict[str, list[torch.Tensor]] = {}
            for column in layer.specs:
                name, _, head = column.name.partition(".")
                state = self.case.state(self.plan.states.get(name, ""), step)
                if column.name == RANK.name and step:
                    columns[column.name] = [torch.arange(len(row)).float() for row in slots[index]]
                elif state is not None:
                    if head:  # a column of one query head
                        state = state.unflatten(-1, (-1, self.group))[..., int(head)]
                    columns[column.name] = list(state[index])
                    self.observed = self.seen - (len(slots[index][0]) - state.shape[-1])
            layer.take(slots[index], columns)
            if self.plan.resume is not None:
                layer.update({n: torch.full((1,), x) for n, x in self.plan.resume(self.evictions).items()})

    def append(self, seen: int) -> None:
        """Add one entry per new token in every layer, up to `seen` tokens in all.

        The first call also shows the queries of these tokens to a method that needs all queries since the last
        eviction, and sets the state `memory` if the plan has `prompt_memory`.
        """
        first = self.seen == 0
        for layer in self.layers:
            layer.append(self.seen, seen)
        self.seen = seen
        if first and self.method.needs().queries == "since_last":
            self._observe()
        if first and self.plan.prompt_memory:
            for view, layer in zip(self._views(0), self.layers):
                layer.update({"memory": view.attend(reduce_g="max", reduce_q="sum")})

    def evict(self) -> None:
        """Evict from every layer as the engine does, if an eviction is due. A method that needs all queries since the
        last eviction sees them before it evicts."""
        held = sum(int(layer.valid.sum()) for layer in self.layers) / (len(self.layers) * self.heads)
        due = self.plan.due
        if not (self.method.trigger(1).full(held, self._allowed()) if due is None else due(held, self.seen)):
            return
        if self.method.needs().queries == "since_last" and self.observed < self.seen:
            self._observe()
        views = self._views(max(0, self.seen - self.method.needs().width))
        if self.watch is not None:
            self.watch(self.step, views)
        for layer, decision in zip(self.layers, decide(self.method, views)):
            layer.update(decision.columns)
            layer.keep(decision.keep)
        self.evictions += 1

    def probe(self) -> None:
        """Show the method its probes (queries and keys of extra tokens), which the plan takes from the case. Do nothing
        if the plan has no probes."""
        if self.plan.probes is None:
            return
        for index, layer in enumerate(self.layers):
            for fields in self.plan.probes(self.case, index):
                layer.update(self.method.observe(replace(self._view(index, self.seen), **fields)))

    def kept(self) -> list[set[int]]:
        return [unit for layer in self.layers for unit in layer.kept()]

    def _allowed(self) -> int:
        return self.method.allowed(self.plan.budget, self.prompt_len, self.seen, self.evictions)

    def _observe(self) -> None:
        for view, layer in zip(self._views(self.observed), self.layers):
            layer.update(self.method.observe(view))
        self.observed = self.seen

    def _views(self, first_query: int) -> list[LayerView]:
        """Return the view of every layer, with the queries of all tokens from position `first_query` on."""
        return [self._view(index, first_query) for index in range(len(self.layers))]

    def _view(self, index: int, first_query: int) -> LayerView:
        layer = self.layers[index]
        at = layer.positions.clamp(min=0)[..., None]

        def cached(x: torch.Tensor) -> torch.Tensor:
            return x[index : index + 1].gather(2, at.expand(-1, -1, -1, x.shape[-1]))

        # Without keys the method reads positions only.
        keys = torch.zeros(*layer.positions.shape, 1) if self.k is None else cached(self.k)
        queries = None if self.q is None else self.q[index : index + 1, :, first_query : self.seen]
        view = make_view(
            keys,
            queries,
            values=keys if self.v is None else cached(self.v),
            budget=self._allowed(),
            positions=layer.positions,
            valid=layer.valid,
            columns=layer.columns,
            seen=self.seen,
            prompt_len=self.prompt_len,
            layer=index,
            ordinal=index,
            layer_count=len(self.layers),
            states=layer.states,
            weights=self.plan.weights,
            rope=self.plan.rope,
            eviction_index=torch.tensor([self.evictions]),
        )
        return self._drawn(view, index) if self.plan.draws else view

    def _drawn(self, view: LayerView, index: int) -> LayerView:
        """Return the view with the random numbers of the case as its noise.

        For a protected entry the case has no random number, so 0 stands in for it (1 if `CasePlan.exponential` is set).
        index: the index of the view's layer in the case.
        """
        units = self.case.by_token("noise", self.step)[index * self.heads :]
        rows = [[unit.get(p, 0.0) for p in row] for row, unit in zip(view.positions[0].tolist(), units)]
        fields = {f.name: getattr(view, f.name) for f in dataclass_fields(view)}
        drawn = torch.tensor([rows], dtype=torch.float64)
        return DrawnView(**fields, drawn=(-drawn).exp() if self.plan.exponential else drawn)


def run_case(case: Case, plan: CasePlan, watch: Watch | None = None) -> list[StepResult]:
    """Run one case as its plan says; return one result for each stored step that the plan compares."""
    cache = ReferenceCache(case, plan, make(plan.method, plan.options), watch)
    results = []
    forced = plan.sorted_steps or bool(plan.steps)
    if plan.prefix:
        cache.append(plan.prefix)
    for step, seen in enumerate(case.seen):
        cache.step = step
        if plan.until is not None and seen > plan.until:
            break
        if (plan.steps and step not in plan.steps) or (plan.sorted_steps and not case.in_text_order(step)):
            continue
        if forced:
            cache.load()
            cache.probe()
            cache.evict()
        elif plan.every_token and step:
            for token in range(cache.seen, seen):
                cache.append(token + 1)
                cache.evict()
        else:
            cache.append(seen)
            cache.evict()
        results.append(_compare(plan, case, step, forced, cache.kept()))
        forced = forced or results[-1].exact < 1
    return results


def _compare(plan: CasePlan, case: Case, step: int, forced: bool, got: list[set[int]]) -> StepResult:
    want, scores = plan.kept(case, step), plan.scores(case, step)
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
    """Return whether `got` keeps the same tokens as the reference's `want`, apart from ties.

    Tokens may differ if their reference scores tie with the lowest score that the reference keeps. Without scores, or
    if `got` and `want` have different sizes, every difference gives False.
    """
    swapped = got ^ want
    if not swapped:
        return True
    if scores is None or len(got) != len(want) or not swapped <= scores.keys():
        return False
    cut = min(scores[token] for token in want if token in scores)
    # the lower median, as torch computes it and the format prescribes
    tolerance = TIE * max(statistics.median_low(abs(s) for s in scores.values()), 1e-12)
    return all(abs(scores[token] - cut) <= tolerance for token in swapped)
