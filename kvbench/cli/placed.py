"""Reads the options that say where a run's jobs are executed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.config.parsers import choice, parse, whole
from kvbench.errors import UserError
from kvbench.runner.workers.placement import MOST, NAMES, Placement
from kvbench.runner.workers.slurm_parameters import parse_parameters

OWNERS = {"address": "ray", "slurm": "slurm", "print_sbatch": "slurm"}  # the executor that an option belongs to


def placement(params: Mapping[str, Any]) -> Placement:
    """Return where the user wants the run's jobs to be executed. Raises UserError, or SetupError if a package is
    missing."""
    name, workers = parse("--executor", choice(*NAMES), params["executor"]), params["workers"]
    for option, owner in OWNERS.items():
        if params[option] and name != owner:
            raise UserError(f"--{option.replace('_', '-')} needs --executor {owner}.")
    if name == "slurm" and workers is None:
        raise UserError("--executor slurm needs --workers N, the number of Slurm jobs.")
    placed = Placement(
        name=name,
        workers=None if workers is None else parse("--workers", whole(1, MOST), workers),
        address=params["address"],
        slurm=parse_parameters(params["slurm"] or ()),
    )
    if not params["print_sbatch"]:
        placed.require_package()
    return placed
