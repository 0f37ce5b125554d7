"""Write out the right search procedure for a question of LongProc's travel_planning, step by step.

Follows LongProc's `build_travel_plan_demonstration`. The data hold a plan and its constraints but no
procedure. The search tries cities in the order of the question, depth first, and each step is a line of fixed words.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.scoring.longproc.travel_planning import PROCEDURE

START = "the starting point"


@dataclass(frozen=True, slots=True)
class Visit:
    city: str
    first: int
    last: int

    @property
    def days(self) -> int:
        return self.last - self.first + 1


class Search:
    """A depth-first search for a plan; `lines` holds the steps of the search, `plan` the visits of the plan that it
    found.

    row: a row of the data with the fields `num_cities`, `connected_cities` (pairs), and `constraints`, each of type
    "duration" (`city`, `num_days`) or "fixed" (`city`, `start_day`, `end_day`). Raises ValueError if there is no plan.
    """

    def __init__(self, row: Mapping[str, Any]) -> None:
        rules = row["constraints"]
        self._count = int(row["num_cities"])
        self._flights = {tuple(pair) for pair in row["connected_cities"]}
        fixed = [rule for rule in rules if rule["type"] == "fixed"]
        visits = (Visit(rule["city"], int(rule["start_day"]), int(rule["end_day"])) for rule in fixed)
        self._fixed = sorted(visits, key=lambda visit: visit.first)
        named = {visit.city for visit in self._fixed}
        durations = [(rule["city"], int(rule["num_days"])) for rule in rules if rule["type"] == "duration"]
        self._free = [pair for pair in durations if pair[0] not in named]
        self.lines = [*self._requirements(durations)]
        found = self._extend(1, ())
        if found is None:
            raise ValueError("no trip plan fits the constraints")
        self.plan = found

    def _requirements(self, durations: Sequence[tuple[str, int]]) -> Iterator[str]:
        yield (
            "Read the requirements and identify the cities that have fixed schedules and the cities that need to be "
            "arranged."
        )
        fixed = {visit.city: visit for visit in self._fixed}
        for city, days in durations:
            schedule = f", Fixed Schedule: {_span(fixed[city])}" if city in fixed else ""
            yield f"* City: {city}, Duration: {days} days{schedule}."
        yield ""
        if fixed:
            yield "Cities that have fixed schedules (sorted by their arrival days):"
            yield from (f"* City: {visit.city}, Fixed Schedule: {_span(visit)}." for visit in self._fixed)
        else:
            yield "Cities that have fixed schedules: None."
        yield ""
        yield "Cities needing arrangement:" if self._free else "Cities needing arrangement: None."
        yield from (f"* City: {city}, Duration: {days} days." for city, days in self._free)
        yield ""

    def _extend(self, day: int, plan: tuple[Visit, ...]) -> tuple[Visit, ...] | None:
        """Return a complete plan that begins with `plan`; None if there is none. day: the day on which `plan` ends."""
        depth = 2 * len(plan)
        self._say(depth, f"Current day: {day}. Current plan: {_listed(visit.city for visit in plan)}.")
        if len(plan) == self._count:
            self._say(depth, f"All {self._count} cities are arranged. Complete plan is found!")
            return plan
        for visit in self._options(day, plan, depth):
            if self._fits(visit, plan, depth + 1):
                found = self._extend(visit.last, (*plan, visit))
                if found is not None:
                    return found
        self._say(depth + 1, f"Fail to arrange any option on day {day} in the current arrangement. Drop this branch.")
        return None

    def _options(self, day: int, plan: tuple[Visit, ...], depth: int) -> list[Visit]:
        self._say(depth, f"Check whether the city with an arrival day of Day {day} - is fixed.")
        fixed = next((visit for visit in self._fixed if visit.first == day), None)
        if fixed is not None:
            self._say(depth, f"Yes. The city with an arrival day of Day {day} - is fixed: {fixed.city}.")
            return [fixed]
        there = {visit.city for visit in plan}
        free = [(city, days) for city, days in self._free if city not in there]
        names = _listed(city for city, _ in free)
        self._say(
            depth,
            f"No. Consider possible options from cities needing arrangement: {names} and explore these options in "
            "order.",
        )
        return [Visit(city, day, day + days - 1) for city, days in free]

    def _fits(self, visit: Visit, plan: tuple[Visit, ...], depth: int) -> bool:
        """Return whether a visit fits after a plan. Add the check to the lines of the search, indented by `depth`.

        A visit fits on two conditions: there is a direct flight from the last city of the plan, if the plan has a city;
        and the visit does not end later than the next fixed visit begins, if there is one.
        """
        city, day = visit.city, visit.first
        self._say(
            depth,
            f"Try arranging to visit {city} from Day {day}. Duration: {visit.days} days. Schedule: {_span(visit)}.",
        )
        before = plan[-1].city if plan else START
        self._say(depth, f"Check for direct flight from {before} to {city}.")
        if plan and (before, city) not in self._flights:
            self._say(depth, "No. Drop this branch.")
            return False
        self._say(depth, "Yes.")
        after = next((other for other in self._fixed if other.first > day), None)
        shown = f"{after.city} ({_span(after)})" if after else "None"
        self._say(
            depth,
            f"Check whether this arrangement is compatible with the next fixed schedule after Day {day}: {shown}.",
        )
        if after is None:
            self._say(depth, "No following fixed schedules. This arrangement is compatible.")
        elif not self._ends_before(visit, after, depth):
            return False
        self._say(depth, "This arrangement is feasible for now. Continue to arrange the rest of the plan.")
        return True

    def _ends_before(self, visit: Visit, after: Visit, depth: int) -> bool:
        late = visit.last > after.first
        relation = "later than (>)" if late else "not later than (<=)"
        verdict = "incompatible. Drop this branch" if late else "compatible"
        self._say(
            depth,
            f"The departure day of {visit.city} is Day {visit.last}. The arrival day of {after.city} is Day "
            f"{after.first}. Day {visit.last} is {relation} Day {after.first}. This arrangement is {verdict}.",
        )
        return not late

    def _say(self, depth: int, text: str) -> None:
        self.lines.append((" " * depth + "|- " if depth else "") + text)


def solution(row: Mapping[str, Any]) -> str:
    """Return the right answer to a question: procedure and plan in LongProc's words. Raises as `Search` does."""
    search = Search(row)
    plan: list[str] = []
    for place, visit in enumerate(search.plan):
        arriving = f"Arriving in {visit.city} and visit" if place == 0 else "Visit"
        plan.append(f"**Day {visit.first}-{visit.last}:** {arriving} {visit.city} for {visit.days} days.")
        if place + 1 < len(search.plan):
            plan.append(f"**Day {visit.last}:** Fly from {visit.city} to {search.plan[place + 1].city}.")
    return "\n".join(
        [
            *(PROCEDURE, *search.lines, "</Solving Procedure>", "", "Output the plan in the required format:"),
            *("<Plan>", *plan, "</Plan>"),
        ]
    )


def _span(visit: Visit) -> str:
    return f"Day {visit.first} - {visit.last}"


def _listed(cities: Iterator[str]) -> str:
    return f"[{', '.join(cities)}]"
