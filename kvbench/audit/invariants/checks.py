"""Lists all invariants, and checks them for several methods on several models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvbench.audit.invariants import effect, generation, queries, storage
from kvbench.audit.invariants.exam import SPECIAL, Exam, Way
from kvbench.audit.invariants.subject import Subject
from kvbench.audit.outcome import Broken, Check, Mark, NotApplicable, Stopped, in_one_line
from kvbench.eviction.api import Method


@dataclass(frozen=True, slots=True)
class Invariant:
    """One invariant: the function that checks it, and two flags that say on which generations this function runs.

    special: the function also runs on the `Special` ways (chunked, tail, share). each_layout: the function runs on
    every layout (dense, paged); False if it compares the layouts itself, or if the layout does not matter.
    """

    check: Callable[[Exam, Any], None]  # takes a `Way` or `AuditLayout`; docstring: see `statement`
    special: bool = False
    each_layout: bool = True

    @property
    def statement(self) -> str:
        return " ".join((self.check.__doc__ or "").partition("\n\n")[0].split())


INVARIANTS = {
    "runs": Invariant(generation.runs, special=True),
    "budget": Invariant(generation.budget, special=True),
    "protect": Invariant(generation.protect, special=True),
    "real": Invariant(generation.real, special=True),
    "batch": Invariant(generation.batch),
    "leak": Invariant(generation.leak),
    "memory": Invariant(generation.memory),
    "effect": Invariant(effect.effect, each_layout=False),
    "full": Invariant(generation.full, each_layout=False),
    "oracle": Invariant(generation.oracle, special=True),
    "past": Invariant(generation.past),
    "layouts": Invariant(generation.layouts, each_layout=False),
    "generate": Invariant(generation.generate, each_layout=False),
    "queries": Invariant(queries.queries, special=True),
    "storage": Invariant(storage.storage),
}


def audit(
    methods: Sequence[tuple[str, Method]],
    models: Sequence[Subject],
    progress: Callable[[str], None] = lambda text: None,
) -> list[Check]:
    """Check all invariants of all methods on all models. progress: called with "METHOD on MODEL" before each method and
    model."""
    checks: list[Check] = []
    for name, method in methods:
        for subject in models:
            progress(f"{name} on {subject.name}")
            checks.extend(_checks(name, method, subject))
    return checks


def _checks(method_name: str, method: Method, subject: Subject) -> Iterator[Check]:
    check = partial(Check, method=method_name, model=subject.name)
    try:
        exam = Exam(method, subject)
    except NotApplicable as why:
        yield from [check(invariant=name, layout="", verdict="n/a", reason=str(why)) for name in INVARIANTS]
        return
    for name, invariant in INVARIANTS.items():
        ways: tuple[Way, ...] = exam.layouts if invariant.each_layout else exam.layouts[:1]
        for way in (*ways, *SPECIAL) if invariant.special else ways:
            mark, reason = _mark(name, exam, way)
            layout = way if invariant.each_layout else ""
            yield check(invariant=name, layout=layout, verdict=mark, reason=reason)


def _mark(name: str, exam: Exam, way: Way) -> tuple[Mark, str]:
    try:
        exam.main(way)
    except NotApplicable as why:
        return "n/a", str(why)
    except Stopped as stopped:
        # The engine stops a generation that exceeds the budget. Only one invariant reports the error: `budget` if the
        # budget was exceeded, otherwise `runs`.
        guilty = "budget" if str(stopped.error).startswith("budget exceeded") else "runs"
        return ("FAIL", str(stopped)) if name == guilty else ("n/a", "the generation ended with an error")
    try:
        INVARIANTS[name].check(exam, way)
    except NotApplicable as why:
        return "n/a", str(why)
    except (Broken, Stopped) as broken:
        return "FAIL", str(broken)
    except Exception as error:
        return "FAIL", in_one_line(error)
    return "ok", ""
