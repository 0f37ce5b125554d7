"""Parses the parameters of Slurm jobs that the user gives with ``--slurm NAME=VALUE``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from kvbench.errors import UserError, quote

CLUSTER = "cluster"  # "slurm", or "local": submitit's stand-in for Slurm on this machine
TIME = "time"
MINUTES = 240  # time limit of a Slurm job, if the user gives none; submitit requeues a job at its limit
REQUEUES = 1000
LINES = ("setup", "teardown", "srun_args")  # submitit's parameters that are lists
_PAIR = re.compile(r"([a-z][a-z0-9_-]*)=(.+)", re.DOTALL)
_GPUS = ("gpus", "gres", "tres")

Parameters = Mapping[str, tuple[str, ...]]


def parse_parameters(texts: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the values of each parameter, by its name with underscores. Raises UserError for invalid text. texts: the
    values of ``--slurm``, such as "partition=gpu,time=240". A comma ends a value only if another NAME= follows."""
    found: dict[str, tuple[str, ...]] = {}
    for pair in (pair for text in texts for pair in re.split(r",(?=[a-z][a-z0-9_-]*=)", text)):
        if not (match := _PAIR.fullmatch(pair)):
            raise UserError(f"--slurm {quote(pair)} is not NAME=VALUE, as in --slurm partition=gpu.")
        name, value = match[1].replace("-", "_"), match[2]
        if name in found and name not in LINES:
            raise UserError(f"--slurm gives {name} twice; give it once.")
        found[name] = (*found.get(name, ()), value)
    if found.get(CLUSTER, ("slurm",))[0] not in ("slurm", "local"):
        raise UserError(f"--slurm cluster={found[CLUSTER][0]}: choose slurm or local.")
    if not re.fullmatch(r"[1-9][0-9]{0,6}", found.get(TIME, ("1",))[0]):
        raise UserError(f"--slurm time={found[TIME][0]}: give the minutes per Slurm job as a whole number.")
    return found


def minutes(parameters: Parameters) -> int:
    return int(parameters[TIME][0]) if TIME in parameters else MINUTES


def names_gpus(parameters: Parameters) -> bool:
    """Return whether a parameter states a Slurm job's GPUs. If none does, a run on GPUs asks for one per Slurm job."""
    return any(name.startswith(_GPUS) for name in parameters)


def for_submitit(parameters: Parameters, valid: Iterable[str], *, gpus: bool) -> dict[str, Any]:
    """Return the arguments for submitit's `AutoExecutor.update_parameters`. valid: names of parameters that submitit
    knows; submitit passes all other parameters to sbatch unchanged. gpus: whether a Slurm job needs a GPU."""
    given: dict[str, Any] = {
        name: list(values) if name in LINES else _typed(values[0])
        for name, values in parameters.items()
        if name not in (CLUSTER, TIME)
    }
    known = {f"slurm_{name}": given.pop(name) for name in tuple(given) if name in {*valid, *LINES}}
    if gpus and not names_gpus(parameters):
        known["gpus_per_node"] = 1
    return known | {"timeout_min": minutes(parameters), "slurm_additional_parameters": given}


def _typed(value: str) -> str | int | bool:
    if value in ("true", "True"):
        return True  # a flag of sbatch without a value
    return int(value) if re.fullmatch(r"[0-9]{1,9}", value) else value
