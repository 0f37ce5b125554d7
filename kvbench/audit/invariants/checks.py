"""All invariants of several methods on several models, as a list of checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvbench.audit.invariants import queries as queries  # registers its invariant
from kvbench.audit.invariants import storage as storage  # the same
from kvbench.audit.invariants.case import SPECIAL, Case, Way
from kvbench.audit.invariants.generation import INVARIANTS, Invariant
from kvbench.audit.invariants.subject import Subject
from kvbench.audit.outcome import Broken, Check, NotApplicable, Stopped, Verdict, told
from kvbench.eviction.api import Method


def audit(
    methods: Sequence[tuple[str, Method]], models: Sequence[Subject], tick: Callable[[str], None] = lambda text: None
) -> list[Check]:
    """methods: with the names to show. tick: called with what comes next."""
    checks: list[Check] = []
    for name, method in methods:
        for subject in models:
            tick(f"{name} on {subject.name}")
            checks.extend(_checks(name, method, subject))
    return checks


def _checks(name: str, method: Method, subject: Subject) -> Iterator[Check]:
    def check(invariant: str, layout: str, verdict: Verdict, reason: str) -> Check:
        return Check(
            method=name, invariant=invariant, model=subject.name, layout=layout, verdict=verdict, reason=reason
        )

    try:
        case = Case(method, subject)
    except NotApplicable as why:
        yield from [check(name, "", "n/a", str(why)) for name in INVARIANTS]
        return
    for invariant in INVARIANTS.values():
        ways: tuple[Way, ...] = case.layouts if invariant.each_layout else case.layouts[:1]
        for way in (*ways, *SPECIAL) if invariant.special else ways:
            verdict, reason = _judge(invariant, case, way)
            yield check(invariant.name, way if invariant.each_layout else "", verdict, reason)


def _judge(invariant: Invariant, case: Case, way: Way) -> tuple[Verdict, str]:
    try:
        case.main(way)
    except NotApplicable as why:
        return "n/a", str(why)
    except Stopped as stopped:
        # The engine itself refuses some of what is looked for here: it is told once, where it belongs.
        guilty = "budget" if str(stopped.error).startswith("budget exceeded") else "runs"
        return ("FAIL", str(stopped)) if invariant.name == guilty else ("n/a", "the generation ended with an error")
    try:
        invariant.check(case, way)
    except NotApplicable as why:
        return "n/a", str(why)
    except (Broken, Stopped) as found:
        return "FAIL", str(found)
    except Exception as error:
        return "FAIL", told(error)
    return "ok", ""
