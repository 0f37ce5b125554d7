"""Training data of the built-in model: the stages of training, their tasks, and each task's levels of difficulty.

A task climbs to the next level when it has had at least `PATIENCE` batches at its level and the model's accuracy on
each kind of token in `GATES` is above the threshold of this kind. A batch is a pure function of (seed, step, stage,
levels, tokens per batch), so a resumed training draws the same batches. All problems of a batch have the same task and
the same generator settings (knobs), so they have equal length and need no padding.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvbench.taskkit.synthetic import chain, lookup, walk
from kvbench.taskkit.synthetic.draw import Draw
from kvbench.taskkit.synthetic.problem import ANSWER, FACT, FORM, KINDS, PLAN, RESULT, STEP, Problem
from kvbench.taskkit.synthetic.variants import Knobs, generate
from kvbench.taskkit.synthetic.vocabulary import END_ID, ids

WEIGHTS = {FORM: 0.5, PLAN: 1.0, FACT: 2.0, RESULT: 3.0, STEP: 1.0, ANSWER: 4.0}
_CODE = {kind: i for i, kind in enumerate(KINDS)}
BATCH_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of training. `mixture`: each task's share of batches; `muon_lr`: Muon's peak learning rate."""

    name: str
    steps: int
    mixture: dict[str, float]
    muon_lr: float
    review: float = 0.3  # share of batches from lower levels


SETTLE = {"digits": 0.25, "lines": 0.15, "chain": 0.45, "lookup": 0.15}
STAGES = (
    Stage(name="base", steps=2600, mixture={"chain": 0.75, "lookup": 0.25}, muon_lr=0.015),
    Stage(name="lines", steps=400, mixture={"lines": 0.6, "chain": 0.3, "lookup": 0.1}, muon_lr=0.012),
    Stage(name="joint", steps=1600, mixture={"digits": 0.5, "lines": 0.2, "chain": 0.2, "lookup": 0.1}, muon_lr=0.012),
    # The learning rates fall in this stage. Copying the plan of a `chain` problem is what the model learns last, so
    # `chain` has a large share, and half of the batches come from lower levels.
    Stage(name="settle", steps=2200, mixture=SETTLE, muon_lr=0.012, review=0.5),
)

Range = tuple[int, int]

# for each level, the ranges of facts, steps, distractors and fillers
CHAIN: tuple[tuple[Range, Range, Range, Range], ...] = (
    ((3, 5), (2, 3), (0, 0), (0, 1)),
    ((3, 6), (3, 6), (0, 6), (0, 8)),
    ((3, 6), (6, 12), (0, 6), (0, 10)),
    ((3, 7), (10, 20), (0, 8), (0, 12)),
    ((3, 7), (18, 32), (0, 8), (0, 12)),
)
# for each level, the ranges of facts, asked keys and fillers
LOOKUP: tuple[tuple[Range, Range, Range], ...] = (
    ((3, 6), (1, 3), (0, 2)),
    ((4, 12), (1, 8), (0, 8)),
    ((8, 20), (1, 16), (0, 14)),
)
DIGITS: tuple[Range, ...] = ((8, 40), (30, 100), (60, 200), (100, 320), (200, 500))  # steps
LINES: tuple[Range, ...] = ((2, 4), (4, 10), (8, 30), (20, 64))  # lines

LEVELS = {"chain": len(CHAIN), "lookup": len(LOOKUP), "digits": len(DIGITS), "lines": len(LINES)}
GATES = {
    "chain": dict.fromkeys((FACT, PLAN, RESULT), 0.97),
    "lookup": {FACT: 0.97, PLAN: 0.97},
    "digits": {STEP: 0.98},
    "lines": dict.fromkeys((FACT, PLAN, RESULT), 0.97),
}
PATIENCE = 40  # least number of batches at a level
MEMORY = 0.9  # weight of the earlier batches in a running accuracy


@dataclass(slots=True)
class Ladder:
    """The level of difficulty of every task, and the running accuracies that decide when a task climbs to the next."""

    level: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LEVELS, 0))
    seen: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LEVELS, 0))
    accuracy: dict[str, dict[str, float]] = field(default_factory=lambda: {task: {} for task in LEVELS})

    def learn(self, batch: Batch, right: dict[str, float]) -> bool:
        """Update the running accuracies with those of one batch. If the batch's task is ready, raise its level.

        Returns whether the level was raised. A batch from a lower level changes nothing. right: the batch's share of
        right tokens, by kind of token.
        """
        task = batch.task
        if batch.level != self.level[task]:
            return False  # a batch for review: running accuracies are only those of the current level
        running = self.accuracy[task]
        for kind, share in right.items():
            running[kind] = MEMORY * running[kind] + (1 - MEMORY) * share if kind in running else share
        self.seen[task] += 1
        passed = all(running.get(kind, 0.0) > gate for kind, gate in GATES[task].items())
        climbs = passed and self.seen[task] >= PATIENCE and self.level[task] + 1 < LEVELS[task]
        if climbs:
            self.level[task] += 1
            self.seen[task] = 0
        return climbs


@dataclass(frozen=True, slots=True)
class Batch:
    task: str
    level: int
    tokens: np.ndarray  # [problems, prompt + solution] int64
    kinds: np.ndarray  # [solution] index into KINDS; the same for every problem
    n_prompt: int


def draw_batch(seed: int, step: int, stage: Stage, ladder: Ladder, batch_tokens: int = BATCH_TOKENS) -> Batch:
    draw = Draw("tiny", seed, step)
    task = draw.weighted(stage.mixture)
    level = ladder.level[task]
    if level and draw.chance(stage.review):
        level = draw.below(level)
    knobs = draw_knobs(task, level, draw)
    problems = [generate(draw.below(2**40), knobs)]
    length = len(problems[0].prompt_pieces) + len(problems[0].solution_pieces) + 1
    problems += [generate(draw.below(2**40), knobs) for _ in range(max(1, batch_tokens // length) - 1)]
    return pack(task, level, problems)


def pack(task: str, level: int, problems: list[Problem]) -> Batch:
    tokens = np.array([[*ids(p.prompt_pieces), *ids(p.solution_pieces), END_ID] for p in problems], dtype=np.int64)
    kinds = np.array([_CODE[kind] for kind in (*problems[0].solution_kinds, ANSWER)])
    return Batch(task, level, tokens, kinds, len(problems[0].prompt_pieces))


def draw_knobs(task: str, level: int, draw: Draw) -> Knobs:
    """Draw random settings (knobs) of a task's problem generator, from the ranges of a level of difficulty."""
    if task == "chain":
        facts, steps, distract, fill = (draw.between(*span) for span in CHAIN[level])
        s0 = draw.between(1, 99 - steps) if draw.chance(0.3) else 1
        return chain.Knobs(n_facts=facts, n_steps=steps, n_distract=distract, n_filler=fill, s0=s0)
    if task == "lookup":
        facts, asked, fill = (draw.between(*span) for span in LOOKUP[level])
        return lookup.Knobs(n_facts=facts, n_ask=min(asked, facts), n_filler=fill)
    if task == "digits":
        return walk.Digits(n_steps=draw.between(*DIGITS[level]), n_filler=draw.between(0, 8) * draw.below(2))
    fill, distract = (0, 0) if draw.chance(0.6) else (draw.between(0, 4), draw.between(0, 4))
    return walk.Lines(n_lines=draw.between(*LINES[level]), n_filler=fill, n_distract=distract)
