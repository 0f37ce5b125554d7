"""Turns rows into tables: for each task, every method at every budget with error bars, cost and a paired comparison.

    for table in make_tables(load([Path("results/demo")]), baseline="full"):
        table.cells[0].score.mean, table.cells[0].against.paired.diff

Comparisons are paired question by question, and their p-values are Holm-adjusted over the table. For a cell without a
comparison, `against` is None.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvbench.errors import UserError, counted, quote
from kvbench.eviction import choose
from kvbench.eviction.budget import label as label_of
from kvbench.registry import did_you_mean
from kvbench.report import stats, sureness
from kvbench.report.best import Best, best_per_budget
from kvbench.report.cells import (
    FULL,
    UNBOUNDED,
    Against,
    ScoreCell,
    answered,
    at_budget,
    cells_of,
    clusters_of,
    idle_note,
    make_cell,
    mean,
    method_label,
    options_of,
    paired,
    question_mean,
    speed,
    speed_sd,
)
from kvbench.report.layers import Layer, evictable_note, evictable_share, later_tokens, layers_of
from kvbench.report.load import Group, Loaded
from kvbench.report.rows import Rows
from kvbench.store.identity import canonical_json

UNEVEN = 0.25  # cells whose loads per core differ by more get a warning about their speeds


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTable:
    """The cells of one task in one group of comparable rows. `headline` is the score column behind `ScoreCell.score`.

    `best`: the best methods, for each budget at which several methods have scores.
    """

    group: str
    task: str
    headline: str
    interval: int | None
    cells: list[ScoreCell]
    notes: list[str]
    best: list[Best] = field(default_factory=list)


def make_tables(loaded: Loaded, baseline: str | None = None) -> list[TaskTable]:
    """Return one table per group of comparable rows. `baseline`: the name of a method, or a method with options as
    tables print it. By default the baseline is the full cache; if the full cache was not run, nothing is compared.
    Raises UserError if `baseline` was not run, or if it names a method that was run with several choices of options."""
    pairs = _variants(loaded)
    shared = shared_options(loaded)
    there = sorted(shared)
    labels = {method_label(method, options, shared[method]) for method, options in pairs}
    name = _baseline(baseline, labels, there) if baseline else FULL
    layers = functools.cache(functools.partial(layers_of, loaded))
    return [_table(group, name, loaded.progress, shared, layers) for group in loaded.groups]


def _baseline(given: str, labels: Collection[str], there: Sequence[str]) -> str:
    """Return the label or the name of the method that the user gave as --baseline. labels: the labels of all methods in
    the rows. there: their names. A method in the rows need not be installed here. Raises UserError for a method that
    was not run, or not with these options."""
    if given in labels or given in there:
        return given
    name, bracket, options = given.partition("(")
    name = name.strip() if name.strip() in there else choose.canonical(name)
    if name not in there:
        raise UserError(
            f"--baseline {quote(name)} was not run.{did_you_mean(name, there)} Methods: {', '.join(there)}."
        )
    if not bracket:
        return name
    with contextlib.suppress(UserError):  # an option that the method lacks, or a method that is not installed here
        method = choose.from_label(f"{name}({options}")
        if (label := method_label(name, canonical_json(method.options()))) in labels:
            return label
    variants = sorted(label for label in labels if label.partition("(")[0] == name)
    raise UserError(f"--baseline {quote(given)} was not run with these options. In the rows: {', '.join(variants)}.")


def _variants(loaded: Loaded) -> list[tuple[str, str]]:
    """Return (method, options as JSON text) for every combination of options with which a method was run."""
    return [
        (methods.names[m], options.names[o])
        for group in loaded.groups
        for methods, options in [(group.rows.text("method"), group.rows.text("options"))]
        for m, o in sorted(set(zip(methods.codes.tolist(), options.codes.tolist())))
        if m >= 0
    ]


def shared_options(loaded: Loaded) -> dict[str, dict[str, Any]]:
    """Return for each method the options, with their values, that are the same in all rows of the method."""
    pairs = _variants(loaded)
    return {method: _shared([o for m, o in pairs if m == method]) for method, _ in pairs}


def _shared(options: Sequence[str]) -> dict[str, Any]:
    """Return the options, with their values, that are the same in every combination. options: the combinations with
    which one method was run, each as JSON text."""
    tables = [options_of(text) for text in options]
    return {k: v for k, v in tables[0].items() if all(k in table and table[k] == v for table in tables)}


def _table(
    group: Group,
    baseline: str,
    progress: Callable[[Rows], str],
    shared: Mapping[str, Mapping[str, Any]],
    layers: Callable[[], Mapping[str, Sequence[Layer] | None]],
) -> TaskTable:
    rows, headline, clusters = group.rows, group.scoring.headline, clusters_of(group.rows)
    found = list(cells_of(rows, shared))
    parts = [part for _, _, part in found]
    scores = [part.scores(headline) for part in parts]
    made = [
        make_cell(method, budget, part, by_question, clusters, progress(part), votes=group.scoring.votes)
        for (method, budget, part), by_question in zip(found, scores)
    ]
    cells = _ratios(_compare(made, scores, clusters, baseline), scores, parts)
    return TaskTable(
        group=group.label,
        task=group.task,
        headline=headline,
        interval=next((interval for _, interval in rows.firsts("interval")), None),
        cells=cells,
        notes=[*_notes(cells, scores), *_states(rows, layers)],
        best=best_per_budget(cells, scores, clusters),
    )


def _compare(
    cells: Sequence[ScoreCell], scores: Sequence[dict[str, list[float]]], clusters: dict[str, str], baseline: str
) -> list[ScoreCell]:
    """Return the cells with `against` set: the comparison with the baseline's cell, on the questions that both have.

    A cell is compared with the baseline's cell without a budget or, if there is no such cell, with the baseline's cell
    at the same budget. `against` stays None for the baseline's cell itself. It also stays None if the baseline has
    neither of these cells, or if the two cells share no question.
    """
    label = _baseline_label([cell.method for cell in cells], baseline)
    places = {_budget(cell): i for i, cell in reversed(list(enumerate(cells))) if cell.method == label}
    comparisons: dict[int, tuple[int, stats.Paired]] = {}
    for i, cell in enumerate(cells):
        base = places.get("", places.get(_budget(cell)))
        if base is None or base == i:
            continue
        found = paired(scores[i], scores[base], clusters)
        if found is not None:
            # Scores lie between 0 and 1.
            comparisons[i] = base, replace(found, low=max(found.low, -1.0), high=min(found.high, 1.0))
    floors = [cells[i].floor for i in comparisons]
    judged = stats.judge([comparison for _, comparison in comparisons.values()], floors=floors)
    compared = list(cells)
    for (i, (base, comparison)), verdict in zip(comparisons.items(), judged):
        compared[i] = replace(cells[i], against=Against(cells[base].method, comparison, verdict))
    return compared


def _budget(cell: ScoreCell) -> str:
    """Return the budget as the user types it; empty for a cell without a budget."""
    return "" if cell.budget is None else label_of(cell.budget)


def _baseline_label(labels: Sequence[str], baseline: str) -> str:
    """Return the label that the baseline has in a table. If `baseline` is the name of a method that was run with other
    options than its defaults, the label has these options. Raises UserError if there are several such labels."""
    variants = sorted({label for label in labels if label.split("(")[0] == baseline})
    if baseline in labels or not variants:
        return baseline
    if len(variants) > 1:
        raise UserError(
            f"--baseline {quote(baseline)}: this method was run with several choices of options: "
            f"{' and '.join(variants)}. Give one of them."
        )
    return variants[0]


def _ratios(
    cells: Sequence[ScoreCell], scores: Sequence[dict[str, list[float]]], parts: Sequence[Rows]
) -> list[ScoreCell]:
    """Return the cells with `of_full` set: the cell's score, bytes and speed divided by those of the full cache, all on
    the questions that both cells have. If the full cache was not run, the cells stay unchanged."""
    full = next((i for i, cell in enumerate(cells) if not cell.evicts), None)
    if full is None:
        return list(cells)
    whole = answered(parts[full])
    compared = []
    for cell, mine, part in zip(cells, scores, parts, strict=True):
        answers = answered(part)
        both = _shared_rows(answers, whole), _shared_rows(whole, answers)
        means = [question_mean({q: of[q] for q in mine if q in scores[full]}) for of in (mine, scores[full])]
        of_full = {
            "score": _share(*means),
            "bytes": _share(*(mean(rows.number("kv_bytes_peak")) for rows in both)),
            "speed": _share(*map(speed, both)),
        }
        noise = math.hypot(*(_share(speed_sd(rows), speed(rows)) for rows in both))
        of_full["speed_sd"] = of_full["speed"] * noise
        compared.append(replace(cell, of_full=of_full))
    return compared


def _shared_rows(rows: Rows, other: Rows) -> Rows:
    """Return the rows whose questions also occur in `other`."""
    import numpy as np

    questions = rows.text("doc_id")
    there = np.zeros(len(questions.names), dtype=bool)
    there[other.text("doc_id").codes] = True
    return rows.where(there[questions.codes])


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _states(rows: Rows, layers: Callable[[], Mapping[str, Sequence[Layer] | None]]) -> list[str]:
    """Return a list with a line on the share of memory that methods can evict, if the model has recurrent layers;
    otherwise an empty list. layers: a function that returns the layers of each run's model."""
    if not (rows.number("state_bytes") > 0).any():
        return []
    return evictable_note(evictable_share(rows, later_tokens(rows), layers()))


def _notes(cells: Sequence[ScoreCell], scores: Sequence[dict[str, list[float]]]) -> list[str]:
    notes = []
    floors = {_budget(c): c.floor for c in cells if c.floor == c.floor}
    if floors:
        listed = ", ".join(f"{floor:.3f} at {budget}" for budget, floor in floors.items())
        notes.append(f"Floor, the score before the first eviction: {listed}.")
    if len({(c.score.questions, c.samples) for c in cells}) == 1:
        notes.append(
            f"{counted(cells[0].score.questions, 'question')}, {counted(cells[0].samples, 'sample')} in every cell."
        )
    if len(cells) > 1:
        notes += sureness.notes([c.against for c in cells if c.against])
    if len({frozenset(s) for s in scores}) > 1:
        notes.append(
            "Cells have different questions: each score is over the cell's own questions; differences and shares of "
            "the full cache are over shared questions only."
        )
    above = [at_budget(c.method, c.budget) for c in cells if c.others["score"] > c.others["score_partial"]]
    if above:
        notes.append(
            f"Score above partial ({', '.join(above)}): score rates the final answer and partial the steps towards it, "
            "so an answer may be right although its steps are not."
        )
    idle = [c for c in cells if c.evicts and c.samples + c.unscored and math.isnan(c.entries_after_evict)]
    notes += idle_note(at_budget(c.method, c.budget) for c in idle)
    notes += _load(cells)
    if any(cell.marked for cell in cells):
        notes.append(UNBOUNDED)
    return notes


def _load(cells: Sequence[ScoreCell]) -> list[str]:
    """Return a list with a note on the machine's load while the cells ran: speeds cannot be judged without the load.
    The list is empty if no cell has a speed."""
    timed = [cell for cell in cells if not math.isnan(cell.tokens_per_second)]
    loads = [cell.machine_load for cell in timed if not math.isnan(cell.machine_load)]
    if not timed:
        return []
    if not loads:
        return ["Load of the machine while these cells ran: not recorded. Unequal load may explain unequal speeds."]
    gaps = f"; not recorded for {len(timed) - len(loads)} cells" if len(loads) < len(timed) else ""
    span = " to ".join(dict.fromkeys(f"{load:.2f}" for load in (min(loads), max(loads))))
    text = f"Load of the machine while these cells ran: {span} per core{gaps}."
    uneven = gaps or max(loads) - min(loads) > UNEVEN
    return [f"{text} Speeds of cells that ran under different load cannot be compared." if uneven else text]
