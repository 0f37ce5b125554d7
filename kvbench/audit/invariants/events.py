"""The evictions of a trial, read from its log: which entries every head held before each eviction and kept after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvbench.audit.invariants.exam import Exam
from kvbench.audit.invariants.trial import Trial, noise_keys
from kvbench.engine.cache.layout import entry_budget
from kvbench.eviction.api import Method, Phase
from kvbench.records import Request


@dataclass(frozen=True, slots=True)
class Eviction:
    """One eviction in one layer of one sequence: the entries that each head held before and kept after it.

    seen: tokens read before the eviction. acting: the method that evicts in this phase. allowed: how many entries per
    head may stay (`Method.allowed`).
    """

    request: Request
    sample: int
    phase: Phase
    seen: int
    layer: int
    acting: Method
    allowed: int
    before: list[set[int]]  # positions that each head held
    kept: list[list[int]]

    @property
    def dropped(self) -> bool:
        return sum(map(len, self.before)) > sum(map(len, self.kept))

    @property
    def images(self) -> set[int]:
        """The positions of the prompt's tokens that stand for images."""
        spans = self.request.images.spans if self.request.images else ()
        return {at for first, last in spans for at in range(first, last)}

    @property
    def where(self) -> str:
        return f"{self.request.doc_id} prompt, sample {self.sample}, layer {self.layer}, {self.seen} tokens seen"


def evictions(exam: Exam, trial: Trial) -> Iterator[Eviction]:
    """Yield the evictions of each sample in order: first those of the prompt, which all samples of a question share."""
    for request, sample in trial.sequences():
        budget = entry_budget(exam.method, trial.budget, len(request.prompt_ids), exam.group)
        held: dict[int, list[set[int]]] = {}
        upto: dict[int, int] = {}
        times: list[int] = []  # when entries were dropped
        for key, phase in zip(noise_keys(request, sample), PHASES):
            acting = exam.method.during(phase)
            for seen, layer, heads in trial.history.events.get(key, ()):
                if seen not in times:
                    times.append(seen)
                new = range(upto.get(layer, 0), seen)
                before = [old | set(new) for old in held.get(layer, [set()] * len(heads))]
                kept = [head.tolist() for head in heads]
                held[layer], upto[layer] = [set(head) for head in kept], seen
                allowed = acting.allowed(budget, len(request.prompt_ids), seen, times.index(seen))
                yield Eviction(request, sample, phase, seen, layer, acting, allowed, before, kept)


PHASES: tuple[Phase, Phase] = ("prefill", "decode")


def held_at(exam: Exam, trial: Trial, key: int, seen: int) -> list[int]:
    """Return how many entries each head holds after `seen` tokens: one number per head, layer by layer. Layers from
    which the engine never evicts are left out.

    An eviction after exactly `seen` tokens is not counted yet. key: the sequence's name in the log.
    """
    keys, counts = noise_keys(*trial.owner(key)), list[int]()
    for g in exam.evicting:
        last, heads = 0, [0] * g.kv_heads
        for own in keys:
            for at, layer, kept in trial.history.events.get(own, ()):
                if layer == g.index and at < seen:  # a step's entries are counted before the tick that follows the step
                    last, heads = at, [len(head) for head in kept]
        counts.extend(count + seen - last for count in heads)
    return counts
