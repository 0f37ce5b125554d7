"""Phrases that the captions of several figures share, and the text of the file of all captions.

panels(points) # "a panel for each of chain and walk (n = 128 questions), model tiny"
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvbench.report.plots.figure import Figure, Point, distinct

FILE = "captions.txt"
MOST_TASKS = 8  # that a caption names


def panels(points: Sequence[Point]) -> str:
    """Return the part of a caption that names tasks, numbers of questions and models; the figure has a panel for each
    task."""
    tasks = distinct(points, "task")
    named = listed(tasks) if len(tasks) <= MOST_TASKS else f"{len(tasks)} tasks"
    each = f"a panel for each of {named}" if len(tasks) > 1 else f"task {named}"
    return f"{each} ({counted(distinct(points, 'questions'))}), model {listed(distinct(points, 'model'))}"


def counted(questions: Iterable[int]) -> str:
    """Return "n = 128 questions" or, if the numbers differ, "n = 96 to 128 questions"."""
    least, most = min(questions), max(questions)
    return f"n = {least} questions" if least == most else f"n = {least} to {most} questions"


def listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def text(figures: Sequence[Figure], suffixes: Sequence[str]) -> str:
    """Return the text of the file of captions: for each figure the names of its files, its title and its caption."""
    return "\n".join(
        f"{', '.join(f'{figure.name}.{suffix}' for suffix in suffixes)}\n{figure.title}. {figure.caption}\n"
        for figure in figures
    )
