"""The variants of the synthetic tasks, and `floor`, the share of a solution that is generated before any eviction.

At the budgets in `Variant.budgets` (in cache entries), the scores of methods were seen to differ; no code reads the
field.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvbench.taskkit.synthetic import chain, lookup, walk
from kvbench.taskkit.synthetic.problem import HELD_OUT, Problem, Score

Knobs = walk.Knobs | chain.Knobs | lookup.Knobs


@dataclass(frozen=True, slots=True)
class Variant:
    """A variant of a synthetic task: the settings (`knobs`) of its problem generator, under a name."""

    name: str
    task: str  # walk, chain or lookup
    knobs: Knobs
    budgets: tuple[int, ...]

    def generate(self, seed: int) -> Problem:
        return generate(seed, self.knobs)

    def score(self, problem: Problem, output: str) -> Score:
        return _SCORERS[self.task](problem, output)


_SCORERS = {"walk": walk.score, "chain": chain.score, "lookup": lookup.score}


def generate(seed: int, knobs: Knobs) -> Problem:
    """Return the problem that a seed determines. The type of `knobs` selects the task."""
    if isinstance(knobs, chain.Knobs):
        return chain.generate(seed, knobs)
    return lookup.generate(seed, knobs) if isinstance(knobs, lookup.Knobs) else walk.generate(seed, knobs)


def _variants() -> Iterator[Variant]:
    digits, lines = walk.Digits, walk.Lines
    yield Variant("orbit-300", "walk", digits(n_steps=300), (48, 64, 96))  # ten facts, read again and again
    yield Variant("orbit-300f", "walk", digits(n_steps=300, n_filler=8), (48, 64, 96, 128))
    yield Variant("orbit-100", "walk", digits(n_steps=100), (64,))  # short, for smoke tests
    yield Variant("lines-30", "walk", lines(n_lines=30), (64, 96, 192))  # hard: a fact is read about every 150 tokens
    eight = lookup.Knobs(n_facts=16, n_ask=8, n_filler=12)
    yield Variant("lookup-8", "lookup", eight, (64, 96))
    yield Variant("lookup-1", "lookup", replace(eight, n_ask=1), (48, 64))  # one key: for methods that evict the prompt
    four = chain.Knobs(n_facts=4, n_steps=4, n_distract=6, n_filler=8)
    yield Variant("chain-4", "chain", four, (96, 128))
    yield Variant("chain-8", "chain", replace(four, n_facts=6, n_steps=8, n_filler=10), (192, 256))


VARIANTS = {variant.name: variant for variant in _variants()}


def first_eviction(n_prompt: int, budget: int, interval: int) -> int:
    """Return the number of generated tokens before the first token that an eviction can change.

    n_prompt: tokens of the prompt. budget: in cache entries. interval: in generated tokens. If the prompt is longer
    than the budget, the first eviction comes right after the prefill. Otherwise it comes at the first tick (whole
    interval of generated tokens) at which the cache holds more than the budget. In both cases the model has drawn the
    next token from the full cache before the eviction; the result counts this token too.
    """
    if n_prompt > budget:
        return 1
    intervals = (budget - n_prompt) // interval + 1
    return intervals * interval + 1


def floor(knobs: Knobs, budget: int, interval: int) -> float:
    """Return the share of a solution's steps that a model generates before the first eviction. knobs: the settings of
    the problem. budget, interval: as for `first_eviction`.

    If the model makes no mistake with the full cache, no method can have a lower partial score than this share. A table
    of partial scores should therefore state the share, or show (partial - floor) / (1 - floor) as scores.
    """
    problem = generate(HELD_OUT, knobs)
    free = first_eviction(len(problem.prompt_pieces), budget, interval)
    per_step = (len(problem.solution_pieces) - _tail_pieces(problem)) // len(problem.steps)
    return min(1.0, free // per_step / len(problem.steps))


def _tail_pieces(problem: Problem) -> int:
    """Return how many pieces (texts of single tokens) a problem's solution has after its last step."""
    count = length = 0
    while length < len(problem.tail):
        count += 1
        length += len(problem.solution_pieces[-count])
    return count
