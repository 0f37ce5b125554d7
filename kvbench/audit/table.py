"""Prints an audit's results: a table of methods and invariants, every failure, and why checks were left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from kvbench.audit.invariants.checks import INVARIANTS
from kvbench.audit.invariants.exam import SPECIAL
from kvbench.audit.outcome import DROPPED_NOTHING, EVICTS_NOTHING, Check, Mark
from kvbench.console import terminal
from kvbench.errors import counted

UNFOLDED = 10_000  # characters; wider than any table


def overall(checks: Iterable[Check]) -> Mark:
    """Return one mark for several checks: FAIL if a check fails, n/a if none applies, otherwise ok."""
    marks = {check.verdict for check in checks}
    return "FAIL" if "FAIL" in marks else "ok" if "ok" in marks else "n/a"


def checks_of(checks: Sequence[Check], method: str, invariant: str) -> list[Check]:
    return [check for check in checks if (check.method, check.invariant) == (method, invariant)]


def idle(checks: Sequence[Check]) -> list[str]:
    """Return the methods that never dropped an entry, so that the invariant `real` could not be checked."""
    methods = dict.fromkeys(check.method for check in checks)
    reals = {method: checks_of(checks, method, "real") for method in methods}
    reasons = (DROPPED_NOTHING, EVICTS_NOTHING)
    return [m for m, some in reals.items() if overall(some) == "n/a" and any(c.reason in reasons for c in some)]


def show(checks: Sequence[Check], models: Sequence[str]) -> None:
    """Print the table of the checks, their failures, the checks that were left out, and a summary to stdout."""
    methods = list(dict.fromkeys(check.method for check in checks))
    table = terminal.grid("method", *INVARIANTS)
    for method in methods:
        table.add_row(method, *(_styled(overall(checks_of(checks, method, name))) for name in INVARIANTS))
    console = terminal.console()
    wide = console.options.update(width=UNFOLDED)
    console.width = max(console.width, console.measure(table, options=wide).maximum)  # headings stay whole
    console.print(table)
    print()
    for line in [*_failures(checks), *_unchecked(checks)]:
        print(terminal.clean(line))
    counts = [sum(check.verdict == verdict for check in checks) for verdict in ("ok", "FAIL", "n/a")]
    for method in methods:
        if overall(check for check in checks if check.method == method) == "n/a":
            terminal.warning(f"no invariant of {terminal.clean(method)} could be checked; the lines above say why.")
    names = ", ".join(map(terminal.clean, idle(checks)))
    dropped = f" No check saw an entry dropped by {names}." if names else ""
    outcome = {
        "ok": "All invariants hold." + dropped,
        "FAIL": "Not all invariants hold.",
        "n/a": "Nothing was checked.",
    }
    print(
        f"{counted(len(methods), 'method')} on {', '.join(terminal.clean(m) for m in models)}: "
        f"{counts[0]} checks ok, {counts[1]} failed, {counts[2]} do not apply. " + outcome[overall(checks)]
    )


def document(checks: Sequence[Check], models: Sequence[str]) -> dict[str, Any]:
    """Return the content of the JSON document that `kvbench audit --json` prints; it lists every check."""
    methods = list(dict.fromkeys(check.method for check in checks))
    return {
        "ok": overall(checks) == "ok",
        "models": list(models),
        "dropped_nothing": idle(checks),
        "invariants": {name: invariant.statement for name, invariant in INVARIANTS.items()},
        "methods": {
            method: {name: overall(checks_of(checks, method, name)) for name in INVARIANTS} for method in methods
        },
        "checks": [asdict(check) for check in checks],
    }


def _styled(mark: Mark) -> Any:
    from rich.text import Text

    return Text(mark, style={"FAIL": "bold red", "ok": "green", "n/a": "dim"}[mark])


def _failures(checks: Sequence[Check]) -> list[str]:
    """Return a line per method and broken invariant: the first failure's reason, and the place of every failure."""
    lines = []
    for method, invariant in dict.fromkeys((c.method, c.invariant) for c in checks if c.verdict == "FAIL"):
        failed = [c for c in checks_of(checks, method, invariant) if c.verdict == "FAIL"]
        places = ", ".join(_place(c) for c in failed)
        lines.append(f"FAIL  {method}  {invariant}: {failed[0].reason} [{places}]")
    return lines


def _unchecked(checks: Sequence[Check]) -> list[str]:
    """Return lines that say why checks were left out, each with a reason and the methods and invariants of the checks.
    A line names models and layouts only if the invariant was checked on other models or layouts."""
    grouped: dict[tuple[str, str], dict[str, list[str]]] = {}
    for method, invariant in dict.fromkeys((c.method, c.invariant) for c in checks):
        every = checks_of(checks, method, invariant)
        if overall(every) == "n/a":  # reasons of the special ways add nothing
            every = [c for c in every if c.layout not in SPECIAL]
        for reason in dict.fromkeys(c.reason for c in every if c.verdict == "n/a"):
            where = _where([c for c in every if c.verdict == "n/a" and c.reason == reason], every)
            grouped.setdefault((method, reason), {}).setdefault(where, []).append(invariant)
    by_reason: dict[tuple[str, str], list[str]] = {}
    for (method, reason), places in grouped.items():
        for where, names in places.items():
            by_reason.setdefault((reason + where, ", ".join(names)), []).append(method)
    return [f"n/a   {', '.join(methods)}  {names}: {reason}" for (reason, names), methods in by_reason.items()]


def _where(some: Sequence[Check], every: Sequence[Check]) -> str:
    """Return, in brackets, where the checks in `some` were left out; "" if every check in `every` is n/a.

    some: the checks that were left out for one reason. every: all checks of the same method and invariant. If all
    layouts in `some` were left out on every model, the text names the layouts alone; otherwise it names each check's
    model and layout.
    """
    if overall(every) == "n/a":
        return ""
    ways = list(dict.fromkeys(c.layout for c in some))
    of_ways = [c for c in every if c.layout in ways]
    places = ways if len(of_ways) == len(some) and all(ways) else [_place(c) for c in some]
    return f" [{', '.join(places)}]"


def _place(check: Check) -> str:
    return f"{check.model} {check.layout}".strip()
