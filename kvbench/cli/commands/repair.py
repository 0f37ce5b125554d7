"""``kvbench repair RUN``: makes the tables of a run again from its journal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvbench.cli.commands.show import one_run
from kvbench.console import terminal
from kvbench.store import repair as rebuild

EPILOG = """Example:
  kvbench repair results/demo
"""


def repair(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name.", show_default=False)],
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder of all runs.")] = "results",
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take the run from a process on another host.", metavar="")
    ] = False,
) -> None:
    """Rebuild the tables of a run from its journal, after damage to rows.parquet or texts.parquet."""
    folder = one_run(run, Path(out))
    seal = rebuild(folder, take_over=take_over, say=terminal.warning)
    terminal.note(f"{folder}: {seal['rows']} rows from the journal.")
