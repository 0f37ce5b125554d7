"""Writes the outcome of a comparison in sentences: what fails, what is undecided, what differs. Every sentence is one
line, and text from outside is escaped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvbench import errors
from kvbench.compare.cell import Key, Side
from kvbench.compare.facts import WORDS, Difference
from kvbench.compare.outcome import Judged, Outcome
from kvbench.errors import bare, counted, quote
from kvbench.report.stats import ALPHA, Regression, fewest_clusters

MOST = 4  # names that a sentence lists
WIDE = 0.2  # a note explains lower bounds that are further than this below the difference


def name(one: Judged, outcome: Outcome) -> str:
    """Return a judged cell in words, told apart from the other judged cells (see `named`)."""
    return named(one.key, [other.key for other in outcome.judged])


def named(key: Key, keys: Iterable[Key]) -> str:
    """Return a cell in words. If another cell in `keys` has the same task, method and budget, the text also states this
    cell's model, interval and seed, as far as they differ from the other cell's."""
    alike = [k for k in keys if k.cell == key.cell]
    parts = {"model": key.model, "interval": key.interval, "seed": key.seed}
    own = [f"{part} {value}" for part, value in parts.items() if any(getattr(k, part) != value for k in alike)]
    return bare(key.cell) + (f" ({bare(', '.join(own))})" if own else "")


def sides(outcome: Outcome) -> Iterator[str]:
    """Yield a line for each side: the side's run folders or file, and the version and commit of kvbench that generated
    the answers."""
    base, new = _state(outcome.base), _state(outcome.new)
    same = base == new and all(None not in values for values in base.values())
    yield f"BASE {_place(outcome.base)}: {_said(base)}"
    yield f"NEW {_place(outcome.new)}: {'the same version and commit' if same else _said(new)}"


def _place(side: Side) -> str:
    """Return the folders of a side's runs. If a part of the side comes from a file, return the text that the user typed
    instead."""
    whole = 0 < len(side.folders) == len(side.sources)
    return ", ".join(bare(folder) for folder in side.folders) if whole else bare(side.name)


def _state(side: Side) -> dict[str, set[str | None]]:
    """Return the versions of kvbench ("kvbench_version") and the commits ("git") that generated a side's cells. None:
    unknown."""
    return {name: {cell.facts[name] for cell in side.cells.values()} for name in ("kvbench_version", "git")}


def _said(state: Mapping[str, set[str | None]]) -> str:
    """Return versions and commits in words, as in "kvbench 0.1.0, commit 1a2b3c4"."""
    known = {name: sorted(value for value in values if value) for name, values in state.items()}
    return ", ".join(f"{WORDS[name]} {few(map(bare, values)) or 'unknown'}" for name, values in known.items())


def wide(judged: Sequence[Judged]) -> Iterator[str]:
    """Yield a note if at least one lower bound in a table is far below its difference. The note says why, and what
    raises the bounds."""
    tested = [one.tested.together for one in judged if one.tested and one.verdict != "same"]
    if far := [one for one in tested if one.diff - one.low > WIDE]:
        least = min(far, key=lambda one: one.paired.clusters)
        yield (
            f"Bounds (≥) are wide, down to {min(one.low for one in far):+.3f}, because {_counted(least)} say little "
            "about other questions. More questions or samples narrow them: kvbench compare BASE --plan --margin M says "
            "how many."
        )


def _counted(found: Regression) -> str:
    """Return the number of questions of a test, as in "12 questions" or "12 questions in 3 clusters"."""
    count, clusters = found.paired.questions, found.paired.clusters
    return counted(count, "question") + (f" in {counted(clusters, 'cluster')}" if clusters < count else "")


def failures(outcome: Outcome) -> Iterator[tuple[bool, str]]:
    """Yield (critical, sentence) for each cell that fails and, with --strict, for each critical cell that lacks a
    decision and each unfinished run of NEW. `undecided` says more about undecided cells."""
    for one in outcome.judged:
        if one.reasons:
            yield one.critical, f"{name(one, outcome)}: {fails(one)}"
        elif is_failing(one, outcome):
            needed = "the second run" if one.again else "a decision"
            yield True, f"{name(one, outcome)}: undecided, and --strict requires {needed}."
    for run, progress in outcome.wanting.items():
        yield True, f"{unfinished(run, progress)} --strict requires all rows."


def unfinished(run: str, progress: str) -> str:
    return f"run {quote(run)} is not finished: {bare(progress)}."


def unused(outcome: Outcome) -> Iterator[str]:
    """Yield a sentence for each table of the policy that fits no cell, perhaps because a pattern is mistyped."""
    for number in outcome.policy.unused([one.key for one in outcome.judged]):
        yield f"the policy's [[cells]] table {number} fits no cell of BASE; check its patterns."


def undecided(outcome: Outcome) -> Iterator[str]:
    """Yield sentences on the undecided cells. A sentence says how small a drop the tests of these cells can find. With
    two stages, it may say instead that a second seed must be run."""
    again = [one for one in outcome.undecided if one.again]
    open_ = [one for one in outcome.undecided if not one.again]
    if again:
        names = few(name(one, outcome) for one in again)
        yield f"{names}: the test on the first seed finds a drop. {second_run(outcome)}"
    by_words: dict[str, list[Judged]] = {}
    for one in open_:
        by_words.setdefault(_could_see(one), []).append(one)
    for words, cells in by_words.items():
        yield f"{words} ({few(name(one, outcome) for one in cells)}.)" if len(outcome.judged) > 1 else words


def _could_see(one: Judged) -> str:
    """Return a sentence on the smallest drop that the test of a cell can find, as in "5 questions cannot show a drop
    smaller than 67 points at 80% power." """
    assert one.tested is not None
    found = one.tested.together.paired
    unit = "question" if found.clusters == found.questions else "cluster"
    count = counted(found.clusters, unit)
    if found.clusters < fewest_clusters(2 * ALPHA):
        return f"{count} cannot show a drop of any size; at least {fewest_clusters(2 * ALPHA)} are needed."
    if math.isnan(one.drop) or one.drop >= 1:
        return f"{count} cannot show a drop of any size at 80% power after Holm's correction."
    points = 100 * one.drop
    size = f"{points:.1f}".rstrip("0").rstrip(".") if points < 10 else f"{points:.0f}"
    return f"{count} cannot show a drop smaller than {size} points at 80% power."


def one_stage(outcome: Outcome) -> Iterator[str]:
    """Yield a sentence on the cells that --two-stage tests in one stage, because seeds repeat answers."""
    cells = [one for one in outcome.judged if outcome.stages > 1 and one.tested and one.tested.repeats]
    if cells:
        yield (
            f"--two-stage tests {few(name(one, outcome) for one in cells)} in one stage, at 5%: another seed gives the "
            "same answers."
        )


def second_run(outcome: Outcome) -> str:
    seeds = sorted({key.seed for key in outcome.base.cells} - {key.seed for key in outcome.new.cells})
    if seeds:
        return f"Run the new side with --seed {bare(seeds[0])} too, and compare again with both runs: NEW,NEW2."
    return "Run both sides with another --seed too, and compare again with both runs of each: BASE,BASE2 NEW,NEW2."


def differing(outcome: Outcome) -> Iterator[tuple[str, str]]:
    """Yield (class, sentence) for each fact that differs between the sides. The class is "subject" or "surroundings"
    (see `kvbench.compare.facts`). The sentence has both values; for a fact about methods it also names the methods."""
    found: dict[Difference, list[str]] = {}
    for one in outcome.judged:
        for difference in (found for pair in one.pairs for found in pair.differences):
            found.setdefault(difference, []).append(one.key.method)
    by_fact: dict[tuple[str, str], list[str]] = {}
    for difference, methods in found.items():
        of = few(dict.fromkeys(map(bare, methods))) if difference.name.startswith(("method", "artefacts")) else ""
        values = difference.values + (f" ({of})" if of else "")
        by_fact.setdefault((difference.kind, difference.word), []).append(values)
    for (kind, word), every in by_fact.items():
        yield kind, f"{word} {few(every)}"


def machines(outcome: Outcome) -> str:
    """Return the machines of both sides in words, for a note on speed: for each side at most two devices, processors
    and numbers of threads."""
    sides = []
    for side in (outcome.base, outcome.new):
        facts = [cell.facts for cell in side.cells.values()]
        known = {part: sorted({f[part] or "" for f in facts} - {""}) for part in ("device", "processor", "threads")}
        known["threads"] = [f"{count} thread{'' if count == '1' else 's'}" for count in known["threads"]]
        sides.append(" ".join(bare(value) for values in known.values() for value in values[:2]) or "unknown")
    return sides[0] if sides[0] == sides[1] else f"{sides[0]} against {sides[1]}"


def verdict(one: Judged) -> str:
    """Return the verdict as a table shows it."""
    if one.verdict == "worse":
        return f"worse {p(one.p)}"
    if one.verdict == "no worse":
        return f"no worse than {one.margin:g}"
    if one.again:
        return "undecided: second run"
    return one.verdict


def p(value: float) -> str:
    return "p<0.001" if value < 0.001 else f"p={value:.3f}"


def decisions(outcome: Outcome) -> Iterator[str]:
    """Yield sentences on the cells whose decisions were recorded on both sides: for each cell whose decisions differ,
    the first eviction at which the two sides keep different entries of the same answers.

    A cell whose decisions cannot be compared gets a sentence that says why. If the decisions of all cells are equal,
    one sentence says so.
    """
    replayed = [one for one in outcome.judged if any(pair.decided for pair in one.pairs)]
    for one in replayed:
        if one.decision is not None:
            if isinstance(one.decision, str):
                yield f"Decisions of {name(one, outcome)} cannot be compared: {one.decision}."
            else:
                yield f"Decisions of {name(one, outcome)} on the same answers differ first at {one.decision.words}."
    if replayed and all(one.decision is None for one in replayed):
        yield "Decisions on the same answers are equal in every layer."


def fails(one: Judged) -> str:
    return f"{'; '.join(one.reasons)}."


def is_failing(one: Judged, outcome: Outcome) -> bool:
    """Return whether this cell makes the comparison fail."""
    return (one.critical and one.code > 0) or outcome.lacks_decision(one)


def summary(outcome: Outcome) -> str:
    """Return the number of cells by verdict, as in "12 cells: 1 worse, 2 undecided, 9 same." """
    verdicts = [verdict(one).partition(" p")[0] for one in outcome.judged]
    listed = ", ".join(f"{verdicts.count(word)} {word}" for word in dict.fromkeys(sorted(verdicts)))
    return f"{counted(len(verdicts), 'cell')}: {listed}."


def mapped(outcome: Outcome) -> Iterator[str]:
    """Yield sentences on the methods or models that --map compares, and on the cells that the comparison leaves out
    because of --map."""
    pairs = [pair for one in outcome.judged for pair in one.pairs if pair.renamed]
    both = dict.fromkeys(f"{bare(p.base.key.method)} of BASE with {bare(p.new.key.method)} of NEW" for p in pairs)
    models = dict.fromkeys(f"{bare(p.base.key.model)} with {bare(p.new.key.model)}" for p in pairs)
    if pairs:
        alike = all(pair.base.key.method == pair.new.key.method for pair in pairs)
        yield f"--map compares {few(models if alike else both)}."
    for keys, side, cells in zip(outcome.aside, ("BASE", "NEW"), (outcome.base.cells, outcome.new.cells)):
        if keys:
            yield f"--map leaves out cells of {side}: {few(named(key, cells) for key in keys)}."


def new_only(outcome: Outcome) -> dict[Key, str]:
    """Return the cells that only NEW has, in words, told apart from all cells of the comparison."""
    keys = [*outcome.extra, *(one.key for one in outcome.judged)]
    return {key: named(key, keys) for key in outcome.extra}


def method(one: Judged) -> str:
    """Return the method in words; both methods if --map compares two, as in ``gkv=rkv``."""
    new = {pair.new.key.method for pair in one.pairs} - {one.key.method}
    return "=".join((one.key.method, *sorted(new)))


def few(names: Iterable[str]) -> str:
    """Return the first `MOST` names and the number of the others, as in "a, b, c, d and 3 more"."""
    return errors.few(list(names), MOST)
