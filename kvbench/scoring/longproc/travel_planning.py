"""Score a trip plan: accuracy and partial score are 1 for the right cities and days. Otherwise accuracy is 0, and the
partial score rates the search procedure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvbench.scoring.longproc.tags import between, result
from kvbench.scoring.words import plain_words

PROCEDURE = "<Solving Procedure>"
_VISIT = re.compile(r"\d+-\d+")
_FLIGHT = re.compile(r".*Day (\d+).*from (\w+) to (\w+)")
_TOTAL = re.compile(r"European cities for (\d+) days")

Stay = tuple[str, int]  # a city and the days there


def score_plan(text: str, stays: Sequence[Stay], procedure: str) -> dict[str, float]:
    """Score an output as LongProc's `eval_travel_planning` does, which parses plans as NATURAL PLAN does.

    stays: the right plan; an output's plan is right if it begins with these stays. procedure: the right answer, from
    the line ``<Solving Procedure>`` to the plan. For a wrong plan the partial score is the share of the lines of
    `procedure` that the output has right before its first wrong line. A line is right if it contains the line of
    `procedure` with the same number, both without articles and punctuation. If all compared lines are right, LongProc
    leaves the last one out of the count, and so does kvbench.
    """
    plan = between(text, "Plan")
    if plan is not None and _is_right(plan, stays):
        return result(1.0, 1.0, True)
    wanted, lines = _lines(procedure), _lines(text)
    pairs = list(zip(lines, wanted))
    wrong = next((i for i, (line, right) in enumerate(pairs) if right not in line), max(0, len(pairs) - 1))
    return result(0.0, wrong / len(wanted), plan is not None)


def _is_right(plan: str, stays: Sequence[Stay]) -> bool:
    try:
        return _read(plan)[: len(stays)] == list(stays)
    except ValueError:
        return False


def _read(plan: str) -> list[Stay]:
    """Return the stays of a plan. Their lengths follow from the days of the flights and the last day of the last visit.

    A plan without a visit or without a flight gives []. Raises ValueError for a day of more digits than Python
    reads as an integer (4,300).
    """
    total, visits, flights = None, [], []
    for line in plan.split("\n"):
        if found := _TOTAL.search(line):
            total = int(found[1])
        if visit := _VISIT.search(line):
            visits.append(visit[0])
            if int(visit[0].partition("-")[2]) == total:  # the plan's end: alternatives may follow
                break
        if flight := _FLIGHT.match(line):
            flights.append(flight.groups())
    if not visits or not flights:
        return []
    days = [1, *(int(day) for day, _, _ in flights), int(visits[-1].partition("-")[2])]
    cities = [flights[0][1], *(to for _, _, to in flights)]
    return [(city, days[i + 1] - days[i] + 1) for i, city in enumerate(cities)]


def _lines(text: str) -> list[str]:
    """Return the lines of an answer from its procedure on (all lines, if it has none), without articles and
    punctuation; blank lines are left out."""
    text = text.replace("Output the plan in the required format:", "")
    if PROCEDURE in text:
        text = PROCEDURE + text.split(PROCEDURE)[1]
    return [" ".join(plain_words(line)) for line in text.strip().split("\n") if line.strip()]
