"""Writes a Slurm script that executes a run in shards (``--print-sbatch``)."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from kvbench.runner.workers.slurm_parameters import CLUSTER, LINES, Parameters, names_gpus
from kvbench.store.again import OUT, line

# Options of the command line that the script replaces or does not need -> how many words follow each as its value.
REPLACED = {"--executor": 1, "--workers": 1, "--slurm": 1, "--run-name": 1, "--print-sbatch": 0}

_TEXT = """#!/bin/bash
{flags}
# Save this script as FILE; the two lines below run all shards and join them. Repeat the first to continue shards; if a
# shard is still locked because its job was killed on another machine, add --take-over to the kvbench command once.
#   job=$(sbatch --parsable FILE)
#   sbatch --dependency=afterany:$job --wrap {join}
{exports}{lines}"""


def script(
    command: Sequence[str],
    variables: Mapping[str, str],
    name: str,
    out: str,
    shards: int,
    parameters: Parameters,
    *,
    gpus: bool,
) -> str:
    """Return a script for sbatch: a Slurm array with one Slurm job per shard.

    command: the words of the user's command line after ``kvbench``. variables: the environment variables that give
    settings of the run, which the script exports because the Slurm jobs may begin with another environment. name: the
    run's name. out: its results folder. gpus: whether a Slurm job needs a GPU.
    """
    flags = {"job_name": f"kvbench-{name}", "array": f"1-{shards}", "open_mode": "append", "requeue": "true"}
    if gpus and not names_gpus(parameters):
        flags["gpus_per_node"] = "1"
    flags |= {name: values[0] for name, values in parameters.items() if name not in (CLUSTER, *LINES)}
    own = line(["kvbench", *_without_replaced(command), "--run-name", name])
    srun = line(["srun", *parameters.get("srun_args", ())])
    place = [] if out == OUT else ["--out", out]
    # In place of these patterns, NAME-*-of-N would also match the shards of a run NAME-1.
    digits = ["[1-9]" + "[0-9]" * more for more in range(len(str(shards)))]
    folders = " ".join(f"{line([f'{out}/{name}'])}-{number}-of-{shards}" for number in digits)
    join = f"kvbench join {folders} {line(['--run-name', name, *place])}"
    if len(digits) > 1:  # one of the patterns may match no folder; the shell of --wrap would then pass it as a name
        join = line(["bash", "-O", "nullglob", "-c", join])
    lines = [
        *parameters.get("setup", ()),
        f'{srun} {own} --shard "$SLURM_ARRAY_TASK_ID/{shards}"',
        *parameters.get("teardown", ()),
    ]
    return _TEXT.format(
        flags="\n".join(f"#SBATCH --{name.replace('_', '-')}{_value(value)}" for name, value in flags.items()),
        join=shlex.quote(join),
        exports="".join(f"{line(['export', f'{key}={value}'])}\n" for key, value in sorted(variables.items())),
        lines="\n".join(lines),
    )


def _value(value: str) -> str:
    return "" if value.lower() == "true" else f"={shlex.quote(value)}"


def _without_replaced(command: Sequence[str]) -> list[str]:
    """Return the words of a command line without the options in `REPLACED` and their values."""
    kept, skip = [], 0
    for word in command:
        option, equals, _ = word.partition("=")
        if skip:
            skip -= 1
        elif option in REPLACED:
            skip = 0 if equals else REPLACED[option]
        else:
            kept.append(word)
    return kept
