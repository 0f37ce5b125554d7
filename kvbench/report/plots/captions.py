"""Phrases that the captions of several figures of a report share.

panels(points)      # "a panel for each of chain and walk (n = 128 questions), model tiny"
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvbench import errors
from kvbench.report.plots.figure import Point, distinct

MOST_NAMES = 8  # a caption names up to this many tasks; of more tasks it states only the number


def panels(points: Sequence[Point]) -> str:
    """Return the part of a caption that names tasks, numbers of questions and models. If there are more than
    `MOST_NAMES` tasks, their number stands in place of their names.

    The figure has a panel for each pair of a task and a group of runs.
    """
    tables = list(dict.fromkeys((point["task"], point["group"]) for point in points))
    count = Counter(task for task, _ in tables)
    names = [task if count[task] == 1 else f"{task} ({group})" for task, group in tables]
    many = f"{len(names)} {'tasks' if len(names) == len(count) else 'tables'}"
    of = listed(names) if len(names) <= MOST_NAMES else many
    each = f"a panel for each of {of}" if len(names) > 1 else f"task {of}"
    return f"{each} ({counted(distinct(points, 'questions'))}), model {listed(distinct(points, 'model'))}"


def counted(questions: Iterable[int]) -> str:
    """Return "n = 128 questions" or, if the numbers differ, "n = 96 to 128 questions"."""
    least, most = min(questions), max(questions)
    return f"n = {errors.counted(most, 'question')}" if least == most else f"n = {least} to {most} questions"


def listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
