"""``kvbench audit --parity DIR``: compares methods with decisions recorded from the papers' reference code."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.console import terminal

if TYPE_CHECKING:
    from kvbench.audit.parity.cases import Case
    from kvbench.audit.parity.compare import StepResult
    from kvbench.audit.parity.variants import CasePlan


def audit_parity(folder: Path, as_json: bool) -> int:
    """Repeat the cases that were recorded with the papers' code, and print tables or one JSON document. folder: the
    cases lie below it.

    Cases that kvbench cannot repeat are only listed. Returns exit code 0 if at least one decision or value was compared
    and all of them agree with the papers' code: decisions up to ties, values up to rounding. Otherwise returns 1.
    """
    from kvbench.audit.parity.cases import load_cases
    from kvbench.audit.parity.compare import run_case
    from kvbench.audit.parity.values import values
    from kvbench.audit.parity.variants import NotCoveredError, plans
    from kvbench.lazy import torch

    rows: list[dict[str, Any]] = []
    numbers: list[dict[str, Any]] = []
    not_covered: list[dict[str, str]] = []
    with torch.inference_mode():
        for case in load_cases(folder):
            try:
                compared = values(case)
                numbers.extend({"case": case.name, **asdict(v), "equal": v.equal} for v in compared)
                for plan in plans(case) if case.has_decisions or not compared else ():
                    rows.append(_row(case, plan, run_case(case, plan)))
            except NotCoveredError as reason:
                not_covered.append({"case": case.name, "variant": case.variant, "reason": str(reason)})
            case.__dict__.pop("tensors", None)  # keep only one case in memory
    equal = bool(rows or numbers) and all(row["equal"] for row in rows + numbers)
    if as_json:
        document = {"folder": str(folder), "equal": equal, "cases": rows, "values": numbers, "not_covered": not_covered}
        terminal.data(document)
    else:
        _print_tables(rows, numbers, not_covered, equal)
    return 0 if equal else 1


def _row(case: Case, plan: CasePlan, results: list[StepResult]) -> dict[str, Any]:
    return {
        "case": case.name,
        "variant": case.variant,
        "method": plan.method,
        "options": plan.options,
        "budget": plan.budget,
        "mode": "sorted steps" if plan.sorted_steps else "free running",
        "steps": len(results),
        "steps_not_judged": plan.rest,
        "forced_steps": sum(r.forced for r in results),
        "min_overlap": min(r.min_overlap for r in results),
        "mean_overlap": sum(r.mean_overlap for r in results) / len(results),
        "exact": sum(r.exact for r in results) / len(results),
        "equal_up_to_ties": sum(r.equal for r in results) / len(results),
        "equal": all(r.equal == 1 for r in results),
    }


def _print_tables(
    rows: list[dict[str, Any]], numbers: list[dict[str, Any]], not_covered: list[dict[str, str]], equal: bool
) -> None:
    numeric = ("steps", "min overlap", "equal up to ties", "numbers", "difference / tolerance", "equal")
    decisions = ("case", "method and options", *numeric[:3])
    print("decisions against the reference code")
    terminal.table(decisions, map(_cells, rows), right=numeric)
    if numbers:
        cells = (
            (n["case"], n["value"], f"{n['numbers']}", f"{n['error']:.2g}", "yes" if n["equal"] else "NO")
            for n in numbers
        )
        print("values against the reference code")
        terminal.table(("case", "value", *numeric[3:]), cells, right=numeric)
    if not_covered:
        print("not covered")
        terminal.table(("case", "variant", "reason"), (tuple(entry.values()) for entry in not_covered))
    good = sum(row["equal"] for row in rows)
    covered = len({row["case"] for row in rows + numbers})
    verdict = "all decisions equal up to ties" if equal else "DECISIONS DIFFER" if rows else "nothing was compared"
    if not all(row["equal"] for row in numbers):
        verdict = "VALUES DIFFER" if good == len(rows) else "DECISIONS AND VALUES DIFFER"
    compared = f"{good} of {len(rows)} comparisons"
    if numbers:
        compared += f" and {sum(row['equal'] for row in numbers)} of {len(numbers)} values"
    print(f"{compared} on {covered} cases; {len(not_covered)} cases not covered. Verdict: {verdict}.")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    """Return the texts of one line of the table of decisions. row: the result of one comparison, from `_row`."""
    options = " ".join(f"{name}={label_value(value)}" for name, value in row["options"].items())
    steps = str(row["steps"])
    if row["mode"] == "sorted steps":
        steps += " in text order"
    elif row["forced_steps"]:
        steps += f" ({row['forced_steps']} forced)"
    if row["steps_not_judged"]:
        steps += f"; other steps not compared: {row['steps_not_judged']}"
    verdict = "yes" if row["equal"] else f"NO ({row['equal_up_to_ties']:.3f})"
    return row["case"], f"{row['method']} {options}".strip(), steps, f"{row['min_overlap']:.3f}", verdict


def label_value(value: Any) -> str:
    """Return the value of a method's option as tables show it. True and False are written in small letters."""
    return str(value).lower() if isinstance(value, bool) else str(value)
