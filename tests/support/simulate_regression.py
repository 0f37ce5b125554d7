"""Simulated regression runs: how often `kvbench compare` is right, written by one command.

    python -m tests.support.simulate_regression results/statistics            # 2,000 comparisons a line
    python -m tests.support.simulate_regression /tmp/quick --pairs 200

Questions differ in difficulty as those of AIME do: Beta(0.6, 0.5). A drop is a fall of the mean, applied on the logit
scale: questions in the middle fall, those near 0 and 1 hardly move. `wobble` is a change of kernels: every question
moves by noise of its own (0.5 on the logit scale), the mean does not. Two stages draw both sides anew.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from scipy.optimize import brentq
from scipy.special import expit, logit
from scipy.stats import beta

from kvbench.report.stats import ALPHA, Regression, both, holm, regression

DIFFICULTY = (0.6, 0.5)
GRID = logit(beta.ppf((np.arange(20_000) + 0.5) / 20_000, *DIFFICULTY))
FLIPS = 1000
DESIGNS = ((30, 1), (30, 8), (30, 32), (60, 32), (200, 1), (500, 1))
DROPS = (0.02, 0.05, 0.10)
CELLS = (1, 8)


@lru_cache(maxsize=8)
def shift(drop: float) -> float:
    """By how much all logits fall for the mean to fall by `drop`."""
    return float(brentq(lambda by: float((expit(GRID) - expit(GRID - by)).mean()) - drop, 0, 8)) if drop else 0.0


@lru_cache(maxsize=8)
def centred(noise: float) -> float:
    """The shift of all logits after which noise on them leaves the mean as it was."""
    points = np.polynomial.hermite_e.hermegauss(31)
    weights = points[1] / points[1].sum()

    def mean(by: float) -> float:
        return float((expit(GRID[:, None] + by + noise * points[0]) @ weights).mean() - expit(GRID).mean())

    return float(brentq(mean, -3, 3))


@dataclass(frozen=True)
class Design:
    questions: int
    samples: int
    drop: float = 0.0
    wobble: float = 0.0

    def pair(self, draw: np.random.Generator, stages: int = 1) -> list[Regression]:
        """The tests of one comparison: the same questions, each stage with samples of its own."""
        base = logit(np.clip(draw.beta(*DIFFICULTY, self.questions), 1e-12, 1 - 1e-12))
        new = base - shift(self.drop)
        if self.wobble:
            new = new + centred(self.wobble) + draw.normal(0, self.wobble, self.questions)
        drawn = ((self._scores(base, draw), self._scores(new, draw)) for _ in range(stages))
        return [regression(old, now, permutations=FLIPS) for old, now in drawn]

    def _scores(self, logits: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        return draw.binomial(1, expit(logits)[:, None], (self.questions, self.samples))


@dataclass(frozen=True)
class Rates:
    """Shares of comparisons. margin: `no worse than` a margin equal to the true drop, or to 5 points without one."""

    alarms: float
    flips: float
    two_stages: float
    second_runs: float
    passed: float
    printed: float  # mean of the printed smallest drop


def rates(design: Design, pairs: int, draw: np.random.Generator) -> Rates:
    found = [design.pair(draw, 2) for _ in range(pairs)]
    first = np.array([one.p for one, _ in found])
    together = np.array([both(one.p, two.p) for one, two in found])
    margin = design.drop or 0.05
    drops = [one.drop(ALPHA) for one, _ in found]
    return Rates(
        alarms=float((first <= ALPHA).mean()),
        flips=float(np.mean([one.p_sign_flip <= ALPHA for one, _ in found])),
        two_stages=float((together <= ALPHA).mean()),
        second_runs=float((first**2 <= ALPHA).mean()),
        passed=float(np.mean([one.low > -margin for one, _ in found])),
        printed=float(np.nanmean(drops)),
    )


def family(design: Design, cells: int, pairs: int, draw: np.random.Generator) -> float:
    """How often a grid of independent cells without a drop has an alarm after Holm."""
    hits = 0
    for _ in range(pairs):
        hits += min(holm([design.pair(draw)[0].p for _ in range(cells)])) <= ALPHA
    return hits / pairs


def lines(pairs: int, seed: int = 0) -> Iterator[str]:
    yield "# Simulated regression runs"
    yield ""
    yield f"{pairs:,} comparisons a line: `python -m tests.support.simulate_regression results/statistics`"
    yield ""
    yield "Drops in points. No worse: how often the bound excludes the true drop (it should in at most 5%), or 5 points"
    yield "without a drop. Two stages: both reject at 22.36%."
    yield ""
    heads = ("true drop", "alarm, t", "sign flips", "two stages", "second runs", "no worse", "printed drop")
    yield f"| questions x samples | {' | '.join(heads)} |"
    yield "|---" + "|---:" * len(heads) + "|"
    for place, (questions, samples) in enumerate(DESIGNS):
        for number, drop in enumerate((0.0, *DROPS)):
            found = rates(Design(questions, samples, drop), pairs, np.random.default_rng([seed, place, number]))
            yield _line(f"{questions} x {samples}", f"{100 * drop:.0f}", found)
        if samples == 32:
            draw = np.random.default_rng([seed, place, 99])
            yield _line(
                f"{questions} x {samples}", "0, wobble", rates(Design(questions, samples, wobble=0.5), pairs, draw)
            )
    yield ""
    yield "Grids of cells without a drop, 30 x 32, one stage, Holm:"
    yield ""
    yield "| cells | grids with an alarm |"
    yield "|---:|---:|"
    for cells in CELLS:
        share = family(Design(30, 32), cells, pairs // cells, np.random.default_rng([seed, cells, 7]))
        yield f"| {cells} | {share:.3f} |"


def _line(name: str, drop: str, found: Rates) -> str:
    shares = (found.alarms, found.flips, found.two_stages, found.second_runs, found.passed)
    return f"| {name} | {drop} | {' | '.join(f'{share:.3f}' for share in shares)} | {100 * found.printed:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", type=int, default=2000)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join(lines(given.pairs)) + "\n"
    (given.folder / "compare.md").write_text(text, encoding="utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
