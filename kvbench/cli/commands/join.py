"""``kvbench join SHARD...``: joins the folders of a run's shards into one run. No torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvbench.cli.commands.show import one_run
from kvbench.cli.options import takes
from kvbench.console import signals, terminal
from kvbench.errors import few
from kvbench.store import check_run_name, resume_command
from kvbench.store.schema import OK

if TYPE_CHECKING:
    from kvbench.runner.join import Joined

INTERRUPTED = "interrupted: the rows joined so far are saved; the same command joins the others."
EPILOG = """Examples:
  kvbench run --suite first --run-name first --shard 1/2
  kvbench run --suite first --run-name first --shard 2/2
  kvbench join first-1-of-2 first-2-of-2
  kvbench join results/first-[12]-of-2 --run-name all
"""


@takes("run_name", "out", "allow_version_change", "take_over", "json", "quiet")
def join(
    typed: Mapping[str, Any],
    shards: Annotated[
        list[str], typer.Argument(metavar="SHARDS...", help="Folders of shards, or their names.", show_default=False)
    ],
) -> None:
    """Join the shards of a run ('kvbench run --shard') into one run; join again when more rows are there."""
    from kvbench.cli.start import report_on
    from kvbench.runner.join import join
    from kvbench.runner.shard_folder import common_name, read_shards

    out, allowed, quiet = Path(typed["out"]), typed["allow_version_change"], typed["quiet"] or typed["json"]
    folders = read_shards([one_run(name, out) for name in shards], allow_version_change=allowed)
    name = check_run_name(typed["run_name"] or common_name(folders))
    with signals.phase(lambda: INTERRUPTED):
        joined = join(
            folders,
            out,
            name,
            command=sys.argv,
            say=terminal.warning,
            allow_version_change=allowed,
            take_over=typed["take_over"],
        )
    if not quiet:
        _print(joined)
    for text in _notices(joined):
        terminal.warning(text)
    if joined.statuses.total():
        report_on(joined.run_dir, quiet=quiet)
    if typed["json"]:
        terminal.data(_document(joined))
    _check(joined)


def _document(joined: Joined) -> dict[str, Any]:
    shards = [
        {
            "shard": str(part.folder.shard),
            "run": str(part.folder.path),
            "rows": part.rows,
            "planned": part.folder.planned,
            "added": part.added,
            "different": part.different,
        }
        for part in joined.parts
    ]
    return {
        "run": str(joined.run_dir),
        "rows_done": joined.statuses.total(),
        "rows_planned": joined.planned,
        "statuses": dict(joined.statuses),
        "shards": shards,
        "missing_shards": list(map(str, joined.missing)),
    }


def _print(joined: Joined) -> None:
    """Print a table of the shards: for each, its rows, its planned rows, and the rows that it added to the run."""
    numbers = ("rows", "planned", "added")
    rows = [(d["shard"], Path(d["run"]).name, *(str(d[n]) for n in numbers)) for d in _document(joined)["shards"]]
    terminal.table(("shard", "run", *numbers), rows, right=numbers)


def _notices(joined: Joined) -> list[str]:
    """Return lines on shards that are not finished, samples with two different answers, and answers without scores."""
    unfinished = [
        f"{part.folder.shard} ({part.rows} of {part.folder.planned} rows)"
        for part in joined.parts
        if part.rows < part.folder.planned
    ]
    lines = [f"not finished: shard {few(unfinished, 4)}; join again when more rows are there."] * bool(unfinished)
    if different := sum(part.different for part in joined.parts):
        lines.append(f"rows generated twice with different results: {different}; the first result of each counts.")
    if waiting := joined.statuses["unscored"]:
        lines.append(f"{waiting} answers have no score yet; '{resume_command(joined.run_dir)}' scores them.")
    return lines


def _check(joined: Joined) -> None:
    """Raise IncompleteError if rows of the run are missing or failed.

    Answers that have no score yet (status "unscored") are no error; `_notices` names them.
    """
    from kvbench.cli.start import check_scored

    failed = {status: count for status, count in joined.statuses.items() if status not in (OK, "unscored")}
    gone = few(list(map(str, joined.missing)), 4)
    why = f"shard {gone} was not given: " if gone else ""
    check_scored(resume_command(joined.run_dir), joined.planned, joined.statuses.total(), failed, why)
