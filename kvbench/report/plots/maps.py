"""Heat maps of scores. The map's rows are the subtasks of a family of tasks, or the categories of one task, such as the
depths of a needle.

At two lengths or more, the map has a panel for each method and budget, with the lengths as columns. A family at one
length, or a family of tasks without lengths, gets a single panel, with a column for each method and budget.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvbench.errors import UserError
from kvbench.report.categories import LENGTH, CategoryReport, length_of
from kvbench.report.plots.captions import counted, listed
from kvbench.report.plots.figure import Figure, Point, Spec, distinct
from kvbench.report.plots.heat import heat
from kvbench.report.scores import ScoreReport
from kvbench.taskkit.names import base_name

ABOUT = (
    "Mean score, from 0 to 1, of each {kind} of {name} (rows) {across}, {n} in each square, model {models}; no error "
    "bars: the tables have them. An empty square was not run or has no score."
)


def map_figures(report: ScoreReport, points: Sequence[Point]) -> Iterator[Figure]:
    """Yield a map for each family of tasks with scores for at least two subtasks. Then yield a map for each task that
    was run at two or more lengths and has scores for at least two categories."""
    yield from _subtasks(points)
    yield from _categories(report, points)


def _subtasks(points: Sequence[Point]) -> Iterator[Figure]:
    families: dict[tuple[str, str], list[Point]] = {}
    for p in points:
        subtask = LENGTH.sub("", p["task"]).partition("/")[2]
        if subtask:
            square = {"row": subtask, "length": length_of(p["task"]), "share": p["mean"]}
            square |= {"cell": p["cell"], "questions": p["questions"], "model": p["model"]}
            families.setdefault((base_name(p["task"]), p["group"]), []).append(square)
    for (name, group), squares in families.items():
        yield from _figure(name, group, "subtask", squares)


def _categories(report: ScoreReport, points: Sequence[Point]) -> Iterator[Figure]:
    groups = [group for group in report.loaded.groups if LENGTH.search(group.task)]
    try:
        cells = CategoryReport.make(replace(report.loaded, groups=groups)).cells if len(groups) > 1 else []
    except UserError:  # no task has two categories
        return
    models = {(LENGTH.sub("", p["task"]), length_of(p["task"]), p["group"]): p["model"] for p in points}
    families: dict[tuple[str, str, int], list[Point]] = {}
    for cell in cells:
        square = {
            "row": cell.category,
            "length": cell.length,
            "share": None if math.isnan(cell.score.mean) else cell.score.mean,
            "cell": cell.column,
            "questions": cell.score.questions,
            "model": models[cell.task, cell.length, cell.group],
        }
        families.setdefault((cell.task, cell.group, cell.part), []).append(square)
    for (task, group, _), squares in families.items():
        if len(distinct(squares, "length")) > 1:
            yield from _figure(task, group, "category", squares)


def _figure(name: str, group: str, kind: str, squares: Sequence[Point]) -> Iterator[Figure]:
    """Yield the map, if at least two subtasks or categories have scores. kind: what the map's rows are, in words.
    squares: the scores."""
    known = [s for s in squares if s["share"] is not None]
    rows = sorted(distinct(known, "row"))
    lengths = sorted(length for length in distinct(known, "length") if length is not None)
    if len(rows) < 2:
        return
    title = ", ".join(filter(None, (name, group, f"score by {kind}" + (" and length" if len(lengths) > 1 else ""))))
    about = ABOUT.format(
        kind=kind,
        name=name,
        across="by length in tokens (columns), a panel for each method and budget"
        if len(lengths) > 1
        else "for each method and budget (columns)",
        n=counted(distinct(known, "questions")),
        models=listed(distinct(known, "model")),
    )
    yield Figure(f"map-{_stem(name)}-{kind}", title, about, _spec(title, known, rows, lengths))


def _spec(title: str, squares: Sequence[Point], rows: Sequence[str], lengths: Sequence[int]) -> Spec:
    if len(lengths) > 1:
        by_length = [s | {"panel": s["cell"], "column": f"{s['length']}"} for s in squares]
        return heat(title, by_length, rows, [str(length) for length in lengths], x="length (tokens)")
    at_once = [s | {"panel": "", "column": s["cell"]} for s in squares]
    return heat(title, at_once, rows, distinct(at_once, "column"), x=None)


def _stem(text: str) -> str:
    """Return the text in the form that it has in a file's name: in lower case, with hyphens in place of all signs but
    ASCII letters and digits."""
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in text.lower()).strip("-")
