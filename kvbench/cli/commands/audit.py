"""``kvbench audit``: the invariants of methods on small models (`kvbench.audit`), and with ``--parity DIR`` our methods
against the decisions of the published reference code (`kvbench.audit.parity`).
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench import registry
from kvbench.cli.options import Plugins
from kvbench.config.plugins import load_plugins
from kvbench.console import terminal
from kvbench.console.problems import Problems
from kvbench.console.progress import Progress
from kvbench.errors import UserError, show
from kvbench.eviction import choose
from kvbench.eviction.options import describe as describe_options
from kvbench.eviction.options import split_option
from kvbench.sources.models import describe as describe_model

if TYPE_CHECKING:
    from kvbench.audit.parity.cases import Case
    from kvbench.audit.parity.compare import StepResult
    from kvbench.audit.parity.variants import Plan
    from kvbench.eviction.api import Method

EPILOG = """Examples:
  kvbench audit gkv
  kvbench audit snapkv+gkv h2o --json
  kvbench audit --all
  kvbench audit mymethod --plugin mymethod.py --method-opt window=8
  kvbench audit --parity tests/data/parity
  kvbench audit --sandbox tests/data/attacks --throughput
  kvbench audit --scorers tests/data/goldens
"""


def audit(
    methods: Annotated[
        list[str] | None,
        typer.Argument(metavar="METHOD", help="Methods to check; A+B: A on the prompt, B after.", show_default=False),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Check every method.", metavar="")] = False,
    method_opt: Annotated[
        list[str] | None,
        typer.Option("--method-opt", metavar="[METHOD.]NAME=VALUE", help="An option of a method.", show_default=False),
    ] = None,
    plugin: Plugins = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="Folder or hub name. Default: the built-in model and three small random ones.",
            show_default=False,
        ),
    ] = None,
    parity: Annotated[
        str | None,
        typer.Option(
            "--parity", metavar="DIR", help="Compare with decisions recorded from the papers' code.", show_default=False
        ),
    ] = None,
    sandbox: Annotated[
        str | None,
        typer.Option("--sandbox", metavar="DIR", help="Run hostile programs in the sandbox.", show_default=False),
    ] = None,
    throughput: Annotated[
        bool, typer.Option("--throughput", help="With --sandbox: also how fast programs are graded.", metavar="")
    ] = False,
    scorers: Annotated[
        str | None,
        typer.Option("--scorers", metavar="DIR", help="Compare with recorded official scores.", show_default=False),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.", metavar="")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.", metavar="")] = False,
) -> int:
    """Check that methods hold the invariants of the engine, on small models: budget, memory, batches, positions.

    Exit code 0 when all hold, 1 when one does not or nothing was checked.
    """
    if parity is not None:
        if methods or every or method_opt or model:
            raise UserError("--parity compares recorded decisions and takes no methods, options or model.")
        if not Path(parity).is_dir():
            raise UserError(f"--parity {show(parity)} is not a folder.")
        return audit_parity(Path(parity), json)
    if sandbox is not None:
        if methods or every or method_opt or model:
            raise UserError("--sandbox runs hostile programs and takes no methods, options or model.")
        if not Path(sandbox).is_dir():
            raise UserError(f"--sandbox {show(sandbox)} is not a folder.")
        from kvbench.cli.commands.audit_sandbox import audit_sandbox

        return audit_sandbox(Path(sandbox), as_json=json, throughput=throughput, quiet=quiet)
    if throughput:
        raise UserError("--throughput goes with --sandbox.")
    if scorers is not None:
        if methods or every or method_opt or model:
            raise UserError("--scorers compares recorded scores and takes no methods, options or model.")
        if not Path(scorers).is_dir():
            raise UserError(f"--scorers {show(scorers)} is not a folder.")
        from kvbench.cli.commands.audit_scorers import audit_scorers

        return audit_scorers(Path(scorers), as_json=json, quiet=quiet)
    load_plugins(plugin or [])
    chosen = _chosen(methods or [], every, method_opt or [])
    if model is not None:
        describe_model(model)

    from kvbench.audit import table
    from kvbench.audit.invariants.checks import audit as check_all
    from kvbench.audit.invariants.subject import subjects

    progress = _Methods(quiet=quiet)
    with subjects(model) as models:
        progress.begin(len(chosen) * len(models), 0)
        try:
            checks = check_all(chosen, models, progress.next)
        finally:
            progress.end()
        names = [subject.name for subject in models]
    if json:
        terminal.data(table.document(checks, names))
    else:
        table.show(checks, names)
    return 0 if table.overall(checks) == "ok" else 1


class _Methods(Progress):
    """A method on a model instead of a row."""

    _begun = -1

    def next(self, text: str) -> None:
        self._begun += 1
        self.update(self._begun, tokens=0, kv_bytes_now=0, kv_bytes_peak=0)
        self.cell(text)

    def line(self) -> str:
        parts = [f"{self._done}/{self._total} methods x models", self._cell, self._left()]
        return "  ".join(part for part in parts if part)


def _chosen(names: list[str], every: bool, given: list[str]) -> list[tuple[str, Method]]:
    """The methods with their options, each under the name that tables show. Raises UserError."""
    if every and names:
        raise UserError("give methods or --all, not both.")
    if not every and not names:
        raise UserError("no method given. Example: kvbench audit gkv, or --all for every method.")
    problems = Problems()
    texts: list[tuple[str | None, str, str]] = []
    for text in given:
        with problems.collect():
            method, option, value = split_option(text)
            texts.append((choose.canonical(method) if method else None, option, value))
    found: list[str] = []
    for name in registry.methods.names() if every else names:
        with problems.collect():
            found.append(name if "(" in name else choose.canonical(name))
    problems.stop()
    found = list(dict.fromkeys(found))
    chosen, used = [], set[int]()
    for name in found:
        with problems.collect():
            pairs = []
            for place, (owner, option, value) in enumerate(texts):
                if taken := _taken(name, owner, option, value):
                    pairs += taken
                    used.add(place)
            made = choose.parse(name, pairs) if "(" not in name else choose.from_label(name)
            chosen.append((_label(name, made), made))
    for place, (owner, option, value) in enumerate(texts):
        with problems.collect():
            if place not in used and owner:
                raise UserError(
                    f"--method-opt is for method {show(owner)}, which is not audited or has no such option."
                )
            if place not in used:
                raise UserError(f"--method-opt {show(f'{option}={value}')}: none of these methods has the option.")
    problems.stop()
    return chosen


def _taken(name: str, owner: str | None, option: str, value: str) -> list[tuple[str, str]]:
    """An option as `choose.parse` takes it for this method; nothing when it is for others."""
    if "(" in name:
        return []
    parts = name.split("+")
    if owner == name:
        return [(option, value)]
    takers = [
        part
        for part in parts
        if owner in (None, part) and any(info.name == option for info in describe_options(registry.methods.get(part)))
    ]
    return [(option if len(parts) == 1 else f"{part}.{option}", value) for part in takers]


def _label(name: str, method: Method) -> str:
    if "(" in name:
        return name
    changed = ", ".join(f"{option}={_plain(value)}" for option, value in choose.changed(name, method))
    return f"{name}({changed})" if changed else name


def audit_parity(folder: Path, as_json: bool) -> int:
    """Run all cases below a folder, print a table or one JSON document to stdout.

    Returns:
        The exit code: 0 when every decision of every covered case equals the reference's up to ties, every value
        within rounding, and at least one case is covered; 1 otherwise.
    """
    from kvbench.audit.parity.cases import load_cases
    from kvbench.audit.parity.compare import replay
    from kvbench.audit.parity.values import values
    from kvbench.audit.parity.variants import NotCoveredError, plans
    from kvbench.lazy import torch

    rows: list[dict[str, Any]] = []
    numbers: list[dict[str, Any]] = []
    not_covered: list[dict[str, str]] = []
    with torch.inference_mode():
        for case in load_cases(folder):
            try:
                found = values(case)
                numbers.extend({"case": case.name, **asdict(v), "equal": v.equal} for v in found)
                for plan in plans(case) if case.has_decisions or not found else ():
                    rows.append(_row(case, plan, replay(case, plan)))
            except NotCoveredError as reason:
                not_covered.append({"case": case.name, "variant": case.variant, "reason": str(reason)})
            case.__dict__.pop("tensors", None)  # a large folder need not be in memory at once
    equal = bool(rows or numbers) and all(row["equal"] for row in rows + numbers)
    if as_json:
        document = {"folder": str(folder), "equal": equal, "cases": rows, "values": numbers, "not_covered": not_covered}
        terminal.data(document)
    else:
        _print_tables(rows, numbers, not_covered, equal)
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
        if row["steps_not_judged"]:
            steps += f"; not the others: {row['steps_not_judged']}"
        table.add_row(row["case"], f"{row['method']} {options}".strip(), steps, f"{row['min_overlap']:.3f}", verdict)
    console.print(table)
    if numbers:
        second = Table(title="values against the reference code", title_justify="left")
        second.add_column("case", overflow="fold")
        second.add_column("value", overflow="fold")
        for heading in ("numbers", "difference / tolerance", "equal"):
            second.add_column(heading, justify="right")
        for row in numbers:
            verdict = "yes" if row["equal"] else "NO"
            second.add_row(row["case"], row["value"], f"{row['numbers']}", f"{row['error']:.2g}", verdict)
        console.print(second)
    if not_covered:
        missing = Table(title="not covered", title_justify="left")
        for heading in ("case", "variant", "reason"):
            missing.add_column(heading, overflow="fold")
        for entry in not_covered:
            missing.add_row(entry["case"], entry["variant"], entry["reason"])
        console.print(missing)
    good = sum(row["equal"] for row in rows)
    covered = len({row["case"] for row in rows + numbers})
    verdict = "all decisions equal up to ties" if equal else "DECISIONS DIFFER" if rows else "nothing was compared"
    if not all(row["equal"] for row in numbers):
        verdict = "VALUES DIFFER" if good == len(rows) else "DECISIONS AND VALUES DIFFER"
    compared = f"{good} of {len(rows)} comparisons"
    if numbers:
        compared += f" and {sum(row['equal'] for row in numbers)} of {len(numbers)} values"
    console.print(f"{compared} on {covered} cases; {len(not_covered)} cases not covered: {verdict}.")


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
