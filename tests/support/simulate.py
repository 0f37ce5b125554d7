"""Simulated tables of two methods: how often the printed statistics are right.

    python -m tests.support.simulate results/statistics            # 2,000 tables a setting
    python -m tests.support.simulate /tmp/quick --tables 200

Each question has a difficulty from Beta(mean s, (1 - mean) s), through a normal variable of which a fifth is each
method's own: methods differ on every question and on average not at all. Those of a cluster's questions have
correlation `agree`. A drop of d turns each right answer wrong with probability d / mean.

The power is that of the verdict `worse` at the printed drop, in a family whose other comparisons have no drop. The
printed drop varies from table to table; it is the drop at which tables print that drop on average, by iteration. The
mean, not the median: near 0 and 1 a table in two has too few questions that differ, and the median would say little of
the others.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import beta, norm

from kvbench.report.stats import Paired, estimate, judge, paired

DESIGNS = {
    "30 questions": [1] * 30,
    "200 questions": [1] * 200,
    "20 clusters of 3": [3] * 20,
    "12 clusters of 1 to 12": list(range(1, 13)),
    "1 cluster of 40, 10 of 2": [40] + [2] * 10,
    "30 questions, 1 cluster of 30": [1] * 30 + [30],
}
MEANS = (0.01, 0.5, 0.99)
FAMILIES = (1, 4, 8, 16)
AGREE = (0.0, 0.5, 1.0)
BETWEEN = 0.1  # a mean where intervals of very unequal clusters that wholly agree are too narrow
SPREADS = (0.3, 1.1, 5.0, 30.0)  # a + b of the Beta distribution
OWN = 0.2  # share of a question's difficulty that a method has for itself
LATENT = np.linspace(-6, 6, 2401)
PATTERNS = 2100  # all 2,048 of 11 clusters, as reports try them
PILOT = 300  # tables without a drop: the rest of a family
HIGHEST = 0.065  # false alarms of a valid test
MORE = "more than the score"


@lru_cache(maxsize=64)
def _quantiles(mean: float, spread: float) -> np.ndarray:
    return beta.ppf(norm.cdf(LATENT), mean * spread, (1 - mean) * spread)


@dataclass(frozen=True)
class Setting:
    """Where tables come from."""

    design: str
    mean: float
    agree: float = 0.0
    spread: float = 1.1
    samples: int = 32

    @property
    def clusters(self) -> list[int]:
        return [number for number, size in enumerate(DESIGNS[self.design]) for _ in range(size)]

    @property
    def single(self) -> bool:
        return max(DESIGNS[self.design]) == 1

    def latent(self, draw: np.random.Generator) -> np.ndarray:
        """Standard normal, one for each question; those of a cluster have correlation `agree`."""
        sizes = DESIGNS[self.design]
        shared = np.repeat(draw.normal(size=len(sizes)), sizes)
        return math.sqrt(self.agree) * shared + math.sqrt(1 - self.agree) * draw.normal(size=len(shared))

    def difficulty(self, latent: np.ndarray) -> np.ndarray:
        return np.interp(latent, LATENT, _quantiles(self.mean, self.spread))

    def answers(self, difficulty: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        return draw.binomial(1, difficulty[:, None], (len(difficulty), self.samples))

    def one(self, draw: np.random.Generator) -> np.ndarray:
        return self.answers(self.difficulty(self.latent(draw)), draw)

    def two(self, draw: np.random.Generator, drop: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        """Scores of a method and of the baseline."""
        shared = self.latent(draw)
        mine, base = (
            self.difficulty(math.sqrt(1 - OWN) * shared + math.sqrt(OWN) * self.latent(draw)) for _ in range(2)
        )
        return self.answers(mine * (1 - drop / self.mean), draw), self.answers(base, draw)

    def compare(self, a: np.ndarray, b: np.ndarray) -> Paired:
        return paired(a, b, clusters=self.clusters, permutations=PATTERNS if not self.single else 1)

    def pairs(self, tables: int, draw: np.random.Generator, drop: float = 0.0) -> list[Paired]:
        return [self.compare(*self.two(draw, drop)) for _ in range(tables)]

    def differ(self, a: np.ndarray, b: np.ndarray) -> int:
        """Clusters on which the two methods have different numbers of right answers."""
        return int(np.count_nonzero(np.bincount(self.clusters, weights=(a - b).sum(axis=1))))


def rate(hits: int, tables: int) -> dict[str, float]:
    """A share of tables with twice its standard error."""
    share = hits / tables
    return {
        "share": round(share, 4),
        "error": round(2 * math.sqrt(max(share * (1 - share), 0.25 / tables) / tables), 4),
    }


def coverage(setting: Setting, tables: int, draw: np.random.Generator) -> dict[str, Any]:
    """How often the interval of one method's mean holds the true mean, and how often it misses on either side."""
    found = [estimate(setting.one(draw), clusters=setting.clusters) for _ in range(tables)]
    below = sum(f.low > setting.mean for f in found)
    above = sum(f.high < setting.mean for f in found)
    rules = [f.rule for f in found]
    return {
        **rate(tables - below - above, tables),
        "too_high": round(below / tables, 4),
        "too_low": round(above / tables, 4),
        "width": round(float(np.mean([f.high - f.low for f in found])), 4),
        "rules": ", ".join(f"{name} {rules.count(name) / tables:.0%}" for name in sorted(set(rules))),
    }


def most_alarms(differ: int) -> float:
    """The highest false-alarm rate up to 6.5% of a two-sided test on this many differences: 0 below five.

    The signs of the differences are coin throws. A test can choose which patterns, in pairs, raise an alarm; one pair
    of four signs is already 12.5%, and some sets of questions always give four differences.
    """
    pairs = 2.0 ** max(differ - 1, 0)
    return math.floor(HIGHEST * pairs) / pairs


def false_alarms(setting: Setting, tables: int, draw: np.random.Generator) -> dict[str, Any]:
    """Verdicts other than tied where there is no difference, and how often the difference's interval holds zero.

    `at_most`: the highest share of alarms that any test could have without exceeding 6.5% on some set of questions.
    """
    found, at_most = [], 0.0
    for _ in range(tables):
        a, b = setting.two(draw)
        found.append(setting.compare(a, b))
        at_most += most_alarms(setting.differ(a, b)) / tables
    said = [judge([one])[0].verdict for one in found]
    held = sum(not (one.low > 0 or one.high < 0) for one in found)
    return {
        **rate(said.count("worse") + said.count("better"), tables),
        "at_most": round(at_most, 4),
        "holds_zero": round(held / tables, 4),
        "test": ", ".join(sorted({one.test for one in found})),
    }


def families(setting: Setting, size: int, tables: int, draw: np.random.Generator) -> dict[str, Any]:
    """How often a family without any difference has a verdict of one.

    Families share the tables of one pool, whose few extreme ones decide: their number, share x tables / size, is the
    error.
    """
    pool = setting.pairs(tables, draw)
    hits = sum(
        any(one.verdict in ("worse", "better") for one in judge([pool[i] for i in draw.integers(0, tables, size)]))
        for _ in range(tables)
    )
    share = hits / tables
    return {"share": round(share, 4), "error": round(2 * math.sqrt(share * size / tables), 4)}


def power(setting: Setting, family: int, tables: int, draw: np.random.Generator) -> dict[str, Any]:
    """How often a comparison with the printed drop is `worse` in a family whose others have none."""
    others = setting.pairs(PILOT, draw)

    def printed(pairs: list[Paired]) -> float:
        drops = [one.drop(0.05 / family) for one in pairs if one.test != "equal differences"]
        return float(np.mean(drops)) if drops else math.nan

    drop = printed(others)
    for pilot in (PILOT, PILOT, max(PILOT, tables * 3 // 4)):
        if drop < setting.mean:  # a score cannot fall below 0
            drop = printed(setting.pairs(pilot, draw, drop))
    if not drop < setting.mean:
        return {"drop": round(drop, 4), "share": MORE, "error": ""}
    hits = 0
    for one in setting.pairs(tables, draw, drop):
        rest = [others[i] for i in draw.integers(0, PILOT, family - 1)]
        hits += judge([one, *rest])[0].verdict == "worse"
    return {"drop": round(drop, 4), **rate(hits, tables)}


def settings() -> Iterator[Setting]:
    for design in DESIGNS:
        for mean in MEANS:
            for agree in (0.0,) if max(DESIGNS[design]) == 1 else AGREE:
                yield Setting(design, mean, agree)


def simulate(tables: int, seed: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """(kind of table, line) of coverage, false alarms, families and power."""
    for number, setting in enumerate(settings()):
        draw = np.random.default_rng([seed, number])
        about = {"design": setting.design, "mean": setting.mean, "agree": setting.agree}
        plain = setting.design == "30 questions"
        yield "false-alarms", about | false_alarms(setting, tables, draw)
        for spread in SPREADS if plain else (1.1,):
            yield "coverage", about | {"spread": spread} | coverage(replace(setting, spread=spread), tables, draw)
        if setting.agree == 0.5:
            continue
        for family in FAMILIES if plain else (1, 8):
            draw = np.random.default_rng([seed, number, family])
            if setting.mean == 0.5:
                yield "families", about | {"family": family} | families(setting, family, tables, draw)
            if setting.mean == 0.5 or setting.agree == 0:
                yield "power", about | {"family": family} | power(setting, family, tables, draw)
    for number, design in enumerate(design for design, sizes in DESIGNS.items() if max(sizes) > 1):
        setting, draw = Setting(design, BETWEEN, agree=1.0), np.random.default_rng([seed, number, 0])
        about = {"design": design, "mean": BETWEEN, "agree": 1.0, "spread": setting.spread}
        yield "coverage", about | coverage(setting, tables, draw)


def write(made: dict[str, list[dict[str, Any]]], folder: Path) -> None:
    """A CSV file of each kind, and all in one Markdown file."""
    folder.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for name, rows in made.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        lines += [f"## {name}", "", "| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
        lines += ["| " + " | ".join(str(value) for value in row.values()) + " |" for row in rows] + [""]
    (folder / "tables.md").write_text("\n".join(["# Simulated statistics", "", *lines]).rstrip() + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tables", type=int, default=2000)
    given = parser.parse_args()
    made: dict[str, list[dict[str, Any]]] = {}
    for kind, line in simulate(given.tables):
        made.setdefault(kind, []).append(line)
        print(kind, *line.values(), flush=True)
    write(made, given.folder)


if __name__ == "__main__":
    main()
