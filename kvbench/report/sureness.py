"""Writes the notes below a table: on the smallest drops of the score that the table's comparisons can find, and on the
tests that the comparisons use.

    notes([cell.against for cell in cells if cell.against])

Every table of several cells has these notes. They help to see why a comparison finds no difference: the methods are
equal, there are too few data, or the scores are at the floor or the ceiling, where no difference can be seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvbench.errors import counted
from kvbench.report.cells import Against
from kvbench.report.stats import ALPHA, Paired, fewest_clusters


def notes(family: Sequence[Against]) -> list[str]:
    if not family:
        return ["Nothing is compared: no cell shares a question with the baseline. --baseline METHOD chooses another."]
    tests = [a.paired for a in family]
    return [
        *(*_drops(family), *_without_spread(family), *_out_of_reach(family), *_ceiling(family)),
        *(*_too_few(tests), *_tests(tests)),
    ]


def _within_reach(against: Against) -> bool:
    return against.judged.smallest_drop <= against.judged.room


def _drops(family: Sequence[Against]) -> list[str]:
    spread = [a for a in family if a.paired.test in ("t", "sign flips")]
    drops = [a.judged.smallest_drop for a in spread if _within_reach(a)]
    if not drops:
        return []
    which = "every comparison" if len(drops) == len(family) else "every comparison but those counted below"
    return [f"A true drop of {max(drops):.3f} is found with 80% power in {which}: verdict worse, {_level(family)}."]


def _level(family: Sequence[Against]) -> str:
    level = f"two-sided at {ALPHA:.0%}"
    return level if len(family) == 1 else f"{level} after Holm over {len(family)}, if only that method drops"


def _without_spread(family: Sequence[Against]) -> list[str]:
    equal = [a for a in family if a.paired.test == "equal differences" and _within_reach(a)]
    if not equal:
        return []
    return [
        f"{_comparisons(len(equal))} the same difference on every question, which shows no spread: a drop that turns "
        f"whole questions wrong is found with 80% power from {max(a.judged.smallest_drop for a in equal):.3f} on."
    ]


def _out_of_reach(family: Sequence[Against]) -> list[str]:
    over = [a for a in family if a.judged.smallest_drop > a.judged.room]
    lines = []
    if over:
        least = min(over, key=lambda a: a.judged.smallest_drop - a.judged.room)
        above = f", {least.judged.room:.3f} above the floor" if least.judged.room < least.paired.mean_b else ""
        lines.append(
            f"{_comparisons(len(over))} too little room for a drop: {least.baseline} scores "
            f"{least.paired.mean_b:.3f}{above}, and only a drop of {least.judged.smallest_drop:.3f} or more is found "
            'with 80% power. Otherwise the verdict is "cannot tell".'
        )
    never = [a for a in family if math.isnan(a.judged.smallest_drop) and a.paired.test != "none"]
    if never:
        lines.append(f"{_comparisons(len(never))} too few clusters to find a drop of any size after Holm.")
    return lines


def _ceiling(family: Sequence[Against]) -> list[str]:
    """Return a list with a note if a comparison cannot tell because every score is at the ceiling, otherwise an empty
    list. At the ceiling, a tie does not mean that methods are equal."""
    if not any(a.judged.verdict == "cannot tell" and _within_reach(a) for a in family):
        return []
    lowest = min(min(a.paired.mean_a, a.paired.mean_b) for a in family)
    return [
        f"All scores are at the ceiling: at least {lowest:.3f}, closer to 1 than the smallest drop that is found. A "
        "harder task or a smaller budget tells methods apart."
    ]


def _too_few(pairs: Sequence[Paired]) -> list[str]:
    few = [one.clusters for one in pairs if one.test == "none"]
    if not few:
        return []
    return [
        f"{_comparisons(len(few))} the verdict unknown: {counted(max(few), 'question')} (questions of one source count "
        f"once) are fewer than the {fewest_clusters(ALPHA)} with which an exact test can reach {ALPHA:.0%}."
    ]


def _comparisons(count: int) -> str:
    return "1 comparison has" if count == 1 else f"{count} comparisons have"


def _tests(pairs: Sequence[Paired]) -> list[str]:
    """Return notes on how standard errors and significance tests allow for clusters of unequal size: at most two
    different notes, on the comparisons with the fewest degrees of freedom."""
    lines = [_correction(one) for one in sorted(pairs, key=lambda one: one.df) if not one.equal]
    return list(dict.fromkeys(filter(None, lines)))[:2]


def _correction(one: Paired) -> str:
    about = f"{one.clusters} clusters, the largest with {one.largest} of {one.questions} questions"
    freedom = f"{one.df:.1f} effective degrees of freedom of {one.clusters - 1}"
    if one.test == "t":
        return f"{about}: standard errors are CR2 and t has {freedom}."
    if one.test == "sign flips":
        return (
            f"{about}: t would have {freedom}, so p, verdicts and intervals of differences come from sign flips of "
            "whole clusters."
        )
    return ""
