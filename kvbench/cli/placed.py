"""Reads the options that say where a run's jobs are executed."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from kvbench.config.layers import PREFIX, Gathered
from kvbench.config.parsers import choice, parse, whole
from kvbench.config.run_config import RunConfig
from kvbench.errors import UserError
from kvbench.runner.workers.placement import MOST, NAMES, Placement
from kvbench.runner.workers.sbatch import script
from kvbench.runner.workers.slurm_parameters import parse_parameters

OWNERS = {"address": "ray", "slurm": "slurm", "print_sbatch": "slurm"}  # option -> the executor that it needs


def placement(params: Mapping[str, Any]) -> Placement:
    """Return where the user wants the run's jobs to be executed. Raises UserError for an invalid option, SetupError for
    a missing package."""
    name, workers = parse("--executor", choice(*NAMES), params["executor"]), params["workers"]
    for option, owner in OWNERS.items():
        if params[option] and name != owner:
            raise UserError(f"--{option.replace('_', '-')} needs --executor {owner}.")
    if name == "slurm" and workers is None:
        raise UserError("--executor slurm needs --workers N, the number of Slurm jobs.")
    if params["print_sbatch"] and params["resume"] is not None:
        raise UserError(
            "--print-sbatch cannot be given with --resume. To continue the shards, submit the script again."
        )
    if params["print_sbatch"] and params["shard"] is not None:
        raise UserError("--print-sbatch divides the run into shards itself; leave --shard out.")
    if params["print_sbatch"] and params["dry_run"]:
        raise UserError(
            "--print-sbatch with --dry-run makes a script that only prints plans. Leave out one of the two."
        )
    placed = Placement(
        name=name,
        workers=None if workers is None else parse("--workers", whole(1, MOST), workers),
        address=params["address"],
        slurm=parse_parameters(params["slurm"] or ()),
    )
    if not params["print_sbatch"]:
        placed.require_package()
    return placed


def slurm_script(params: Mapping[str, Any], placed: Placement, chosen: RunConfig, gathered: Gathered) -> str:
    """Return a Slurm script that executes the user's command in shards, with the settings of its environment variables.
    gathered: the settings that the user gave."""
    name, gpus = params["run_name"] or chosen.run_name(), chosen.device != "cpu"
    variables = {key: given.value for key, given in gathered.variables.items() if key not in gathered.flags}
    if chosen.data is None and (data := os.environ.get("KVBENCH_DATA")):
        variables["data"] = data
    exported = {PREFIX + key.upper(): value for key, value in variables.items()}
    return script(sys.argv[1:], exported, name, params["out"], placed.workers or 1, placed.slurm, gpus=gpus)
