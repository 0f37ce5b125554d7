"""``kvbench audit``: checks the invariants of methods on small models; ``--parity``, ``--sandbox``, ``--scorers`` and
``--compare`` run other checks instead.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench import registry
from kvbench.cli.commands.audit_parity import audit_parity, label_value
from kvbench.cli.counter import Counter
from kvbench.cli.options import Document, Plugins, Text, Texts, plain
from kvbench.config.plugins import load_plugins
from kvbench.console import terminal
from kvbench.console.problems import Problems
from kvbench.console.progress import preparing
from kvbench.errors import UserError, quote
from kvbench.eviction import choose
from kvbench.eviction.options import split_option
from kvbench.sources.models import describe as describe_model

if TYPE_CHECKING:
    from kvbench.eviction.api import Method

EPILOG = """Examples:
  kvbench audit gkv
  kvbench audit snapkv+gkv h2o --json
  kvbench audit --all
  kvbench audit mymethod --plugin mymethod.py --method-opt window=8
  kvbench audit --parity tests/data/parity
  kvbench audit --sandbox tests/data/attacks --throughput
  kvbench audit --scorers tests/data/goldens
  kvbench audit --compare demo
"""


def audit(
    methods: Annotated[
        Texts,
        typer.Argument(
            metavar="METHOD", help="Methods to check; A+B: A evicts the prompt, B generated tokens.", show_default=False
        ),
    ] = None,
    every: Annotated[bool, plain("--all", "Check every method.")] = False,
    method_opt: Annotated[Texts, plain("--method-opt", "An option of a method.", "[METHOD.]NAME=VALUE")] = None,
    plugin: Plugins = None,
    model: Annotated[
        Text,
        plain(
            "--model",
            "Model to check on: folder or hub name. Default: the built-in model and five small random ones.",
            "MODEL",
        ),
    ] = None,
    parity: Annotated[
        Text, plain("--parity", "Compare methods with decisions recorded from the papers' code.", "DIR")
    ] = None,
    sandbox: Annotated[Text, plain("--sandbox", "Run the hostile programs of DIR in the sandbox.", "DIR")] = None,
    throughput: Annotated[
        bool, plain("--throughput", "With --sandbox: also measure how fast programs are graded.")
    ] = False,
    scorers: Annotated[
        Text, plain("--scorers", "Compare kvbench's scorers with recorded results of the official scorers.", "DIR")
    ] = None,
    compare: Annotated[
        Text, plain("--compare", "Plant faults in a copy of a run; 'kvbench compare' must catch each.", "RUN")
    ] = None,
    json: Document = False,
    quiet: Annotated[bool, plain("--quiet -q", "No progress.")] = False,
) -> int:
    """Check on small models that methods keep the engine's invariants: budget, memory, batches, positions.

    Exit code 0 when all hold, 1 when one fails or nothing was checked.
    """
    others = {
        "parity": (parity, "compares recorded decisions"),
        "sandbox": (sandbox, "runs hostile programs"),
        "scorers": (scorers, "compares recorded scores"),
        "compare": (compare, "plants faults in a copy of a run"),
    }
    for name, (folder, about) in others.items():
        if folder is not None:
            if methods or every or method_opt or model:
                raise UserError(f"--{name} {about}; leave out METHOD, --all, --method-opt and --model.")
            if name != "compare" and not Path(folder).is_dir():
                raise UserError(f"--{name} {quote(folder)} is not a folder.")
    if parity is not None:
        return audit_parity(Path(parity), json)
    if sandbox is not None:
        from kvbench.cli.commands.audit_sandbox import audit_sandbox

        return audit_sandbox(Path(sandbox), as_json=json, throughput=throughput, quiet=quiet)
    if throughput:
        raise UserError("--throughput needs --sandbox.")
    if scorers is not None:
        from kvbench.cli.commands.audit_scorers import audit_scorers

        return audit_scorers(Path(scorers), as_json=json, quiet=quiet)
    if compare is not None:
        from kvbench.cli.commands.audit_compare import audit_compare

        return audit_compare(compare, as_json=json)
    load_plugins(plugin or [])
    chosen = _chosen(methods or [], every, method_opt or [])
    if model is not None:
        describe_model(model)

    with preparing("loading torch", quiet=quiet):
        from kvbench.audit import table
        from kvbench.audit.invariants.checks import audit as check_all
        from kvbench.audit.invariants.subject import subjects

    with subjects(model) as models, Counter("methods x models", len(chosen) * len(models), quiet=quiet) as counter:
        checks = check_all(chosen, models, counter.begin_next)
        names = [subject.name for subject in models]
    if json:
        terminal.data(table.document(checks, names))
    else:
        table.show(checks, names)
    return 0 if table.overall(checks) == "ok" else 1


def _chosen(names: list[str], every: bool, method_opts: list[str]) -> list[tuple[str, Method]]:
    """Return (name in tables, method with its options) for each method to audit.

    Raises UserError if the user named no method, an unknown method, methods beside --all, or wrong options.
    """
    if every and names:
        raise UserError("give methods or --all, not both.")
    if not every and not names:
        raise UserError("no method given. Example: kvbench audit gkv, or --all for every method.")
    problems = Problems()
    texts: list[tuple[str | None, str, str]] = []
    for text in method_opts:
        with problems.collect():
            method, option, value = split_option(text)
            texts.append((choose.canonical(method) if method else None, option, value))
    known: list[str] = []
    for name in registry.methods.names() if every else names:
        with problems.collect():
            known.append(name if "(" in name else choose.canonical(name))
    problems.stop()
    chosen, used = [], set[int]()
    for name in dict.fromkeys(known):
        with problems.collect():
            pairs = []
            for place, (owner, option, value) in enumerate(texts):
                if taken := _taken(name, owner, option, value):
                    pairs += taken
                    used.add(place)
            instance = choose.parse(name, pairs) if "(" not in name else choose.from_label(name)
            chosen.append((_label(name, instance), instance))
    for place, (owner, option, value) in enumerate(texts):
        with problems.collect():
            if place not in used and owner:
                raise UserError(
                    f"--method-opt {quote(f'{owner}.{option}={value}')}: method {quote(owner)} is not checked here, or "
                    f"has no option {quote(option)}."
                )
            if place not in used:
                raise UserError(f"--method-opt {quote(f'{option}={value}')}: no audited method has the option.")
    problems.stop()
    return chosen


def _taken(name: str, owner: str | None, option: str, value: str) -> list[tuple[str, str]]:
    """Turn an option that the user typed into the (option, value) pairs that `choose.parse` takes for the method
    `name`.

    The list is empty if the option belongs to another method, if the user typed NAME=VALUE and the method has no option
    NAME, or if `name` holds its own options, as "gkv(alpha=0.9)" does. owner: METHOD in METHOD.NAME=VALUE; None if the
    user typed NAME=VALUE.
    """
    if "(" in name:
        return []
    parts = name.split("+")
    if owner == name:
        return [(option, value)]
    takers = [part for part in choose.takers(name, option) if owner in (None, part)]
    return [(option if len(parts) == 1 else f"{part}.{option}", value) for part in takers]


def _label(name: str, method: Method) -> str:
    if "(" in name:
        return name
    changed = ", ".join(f"{option}={label_value(value)}" for option, value in choose.changed(name, method))
    return f"{name}({changed})" if changed else name
