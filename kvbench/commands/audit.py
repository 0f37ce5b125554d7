"""``kvbench audit --parity DIR``: our methods against the decisions of the published reference code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench import terminal

if TYPE_CHECKING:
    from kvbench.parity.cases import Case
    from kvbench.parity.replay import StepResult
    from kvbench.parity.variants import Plan


def audit_parity(folder: Path, as_json: bool) -> int:
    """Run all cases below a folder, print a table or one JSON document to stdout.

    Returns:
        The exit code: 0 when every decision of every covered case equals the reference's up to ties, and at least one
        case is covered; 1 otherwise.
    """
    from kvbench.lazy import torch
    from kvbench.parity.cases import load_cases
    from kvbench.parity.replay import replay
    from kvbench.parity.variants import NotCoveredError, plans

    rows: list[dict[str, Any]] = []
    not_covered: list[dict[str, str]] = []
    with torch.inference_mode():
        for case in load_cases(folder):
            try:
                rows += [_row(case, plan, replay(case, plan)) for plan in plans(case)]
            except NotCoveredError as reason:
                not_covered.append({"case": case.name, "variant": case.variant, "reason": str(reason)})
            case.__dict__.pop("tensors", None)  # a large folder need not be in memory at once
    equal = bool(rows) and all(row["equal"] for row in rows)
    if as_json:
        document = {"folder": str(folder), "equal": equal, "cases": rows, "not_covered": not_covered}
        terminal.data(document)
    else:
        _print_tables(rows, not_covered, equal)
    return 0 if equal else 1


def _row(case: Case, plan: Plan, results: list[StepResult]) -> dict[str, Any]:
    return {
        "case": case.name,
        "variant": case.variant,
        "method": plan.method,
        "options": plan.options,
        "budget": plan.budget,
        "mode": "sorted steps" if plan.sorted_steps else "free running",
        "steps": len(results),
        "forced_steps": sum(r.forced for r in results),
        "min_overlap": min(r.min_overlap for r in results),
        "mean_overlap": sum(r.mean_overlap for r in results) / len(results),
        "exact": sum(r.exact for r in results) / len(results),
        "equal_up_to_ties": sum(r.equal for r in results) / len(results),
        "equal": all(r.equal == 1 for r in results),
    }


def _print_tables(rows: list[dict[str, Any]], not_covered: list[dict[str, str]], equal: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(file=sys.stdout)
    table = Table(title="decisions against the reference code", title_justify="left")
    for heading in ("case", "method and options", "steps", "min overlap", "equal up to ties"):
        right = heading in ("steps", "min overlap", "equal up to ties")
        table.add_column(heading, justify="right" if right else "left", overflow="fold")
    for row in rows:
        options = " ".join(f"{name}={_plain(value)}" for name, value in row["options"].items())
        if row["mode"] == "sorted steps":
            forced = " in text order"
        else:
            forced = f" ({row['forced_steps']} forced)" if row["forced_steps"] else ""
        verdict = "yes" if row["equal"] else f"NO ({row['equal_up_to_ties']:.3f})"
        steps = f"{row['steps']}{forced}"
        table.add_row(row["case"], f"{row['method']} {options}".strip(), steps, f"{row['min_overlap']:.3f}", verdict)
    console.print(table)
    if not_covered:
        missing = Table(title="not covered", title_justify="left")
        for heading in ("case", "variant", "reason"):
            missing.add_column(heading, overflow="fold")
        for entry in not_covered:
            missing.add_row(entry["case"], entry["variant"], entry["reason"])
        console.print(missing)
    good = sum(row["equal"] for row in rows)
    covered = len({row["case"] for row in rows})
    verdict = "all decisions equal up to ties" if equal else "DECISIONS DIFFER" if rows else "nothing was compared"
    console.print(
        f"{good} of {len(rows)} comparisons on {covered} cases; {len(not_covered)} cases not covered: {verdict}."
    )


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
