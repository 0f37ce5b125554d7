"""``kvbench audit --compare RUN``: plants faults in a copy of a run in memory; `kvbench compare` must catch each."""

from __future__ import annotations

from dataclasses import asdict

from kvbench.console import terminal


def audit_compare(run: str, *, as_json: bool) -> int:
    """Print a table or one JSON document, and return the exit code: 0 if every fault is caught, 1 otherwise."""
    from kvbench.compare.planted import checks
    from kvbench.compare.reading import read_side

    found = list(checks(read_side(run)))
    if as_json:
        terminal.data({"run": run, "caught": all(c.caught for c in found), "faults": [asdict(c) for c in found]})
    else:
        rows = []
        for check in found:
            verdict = "caught" if check.caught else f"MISSED, wanted {check.wanted}"
            rows.append((check.name, str(check.found), verdict, terminal.clean(check.says)))
        terminal.table(("planted", "exit code", "", "says"), rows, right=("exit code",))
    return 0 if all(check.caught for check in found) else 1
