"""``kvbench repair RUN``: makes the tables of a run (rows.parquet, texts.parquet) again from the run's journal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from kvbench.cli.commands.show import one_run
from kvbench.cli.options import Out, Run, plain
from kvbench.console import terminal
from kvbench.errors import counted
from kvbench.store import repair as rebuild

EPILOG = """Example:
  kvbench repair results/demo
"""


def repair(
    run: Run,
    out: Out = "results",
    take_over: Annotated[
        bool, plain("--take-over", "Take over a run that a process on another host has locked.")
    ] = False,
) -> None:
    """Rebuild the tables of a run from its journal, after damage to rows.parquet or texts.parquet."""
    folder = one_run(run, Path(out))
    seal = rebuild(folder, take_over=take_over, say=terminal.warning)
    terminal.note(f"{folder}: {counted(seal['rows'], 'row')}, rebuilt from the journal.")
