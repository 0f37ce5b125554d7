"""Counts the memory of every recipe for two real models and three lengths. Run as a script; prints CSV.

    cd tests && OMP_NUM_THREADS=1 python -m support.training_plans > ../results/training/plans.csv

Settings are those of the paper's preset, with prompts and answers of the given length together, on GPUs of 80 GB. As
many processes share a training as divide its batch, at most 8. A plan that does not fit is counted again with the
settings that make it smaller. `markdown` makes the table of docs/training.md from the CSV.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import transformers

from kvbench.runner.bench.shapes import SHAPES
from kvbench.train.catalogue import BUILT_IN, entry_of
from kvbench.train.plan import Device, TrainingPlan

MODELS = {"qwen3-4b": "Qwen3-4B", "r1-distill-qwen-7b": "DeepSeek-R1-Distill-Qwen-7B"}
LENGTHS = (4096, 16_384, 32_768)
PROMPT, PREDICTED = 256, 512  # tokens of a prompt before a long answer; of lookaheadkv's answer to a long prompt
GPU = 80 * 10**9
HEADER = (
    "recipe",
    "model",
    "tokens",
    "processes",
    "phase",
    "peak_bytes",
    "fits",
    "with",
    "peak_bytes_with",
    "fits_with",
)


def lengths(name: str, tokens: int) -> dict[str, int]:
    """Return the settings that give the longest item of a recipe so many tokens."""
    if name == "duo":
        return {"tokens": tokens}
    if name == "lookaheadkv":
        return {"max_prompt": tokens - PREDICTED, "max_tokens": PREDICTED}
    sizes = {"max_prompt": PROMPT, "max_tokens": tokens - PROMPT}
    at_least = {"min_tokens": 0}  # the paper's 4,097 leaves no answer of 4K
    more = {"gkv-distill": {"truncate": tokens - PROMPT}, "kvzap": {"tokens": tokens}}
    more |= {"foresightkv": at_least, "foresightkv-grpo": at_least}
    return sizes | more.get(name, {})


def row(name: str, shape: str, tokens: int) -> Sequence[Any]:
    """Return the row of one recipe, model and length."""
    kind, sizes = SHAPES[shape]
    config = getattr(transformers, f"{kind}Config")(
        **sizes, max_position_embeddings=3 * LENGTHS[-1]
    )  # kvzap reads a text twice
    settings = entry_of(name).settings(MODELS[shape], "paper") | lengths(name, tokens) | {"seed": 0}
    processes = max(n for n in range(1, 9) if settings["batch"] % n == 0)
    plan = TrainingPlan.of(name, config, settings, Device(gpu=True, total=GPU, processes=processes))
    changes, smaller = plan.smaller()
    options = " ".join(f"{option}={value}" for option, value in changes.items())
    least = (options, smaller.peak.bytes, smaller.fits) if changes else ("", "", "")
    phase = plan.uncounted or plan.peak.name
    return name, MODELS[shape], tokens, processes, phase, plan.peak.bytes, plan.fits, *least


def markdown(rows: Iterable[Mapping[str, str]]) -> list[str]:
    """Return the lines of a table with a row per recipe and a column per model and length, in GB per process."""
    cells: dict[str, dict[tuple[str, str], str]] = {}
    for row in rows:
        cells.setdefault(f"`{row['recipe']}`, {row['processes']}", {})[row["model"], row["tokens"]] = _cell(row)
    columns = [(model, str(tokens)) for model in MODELS.values() for tokens in LENGTHS]
    heads = [f"{model.removeprefix('DeepSeek-')}, {int(tokens):,}" for model, tokens in columns]
    lines = [f"| recipe, processes | {' | '.join(heads)} |", f"| --- |{' ---: |' * len(columns)}"]
    return lines + [f"| {name} | {' | '.join(own.get(c, '') for c in columns)} |" for name, own in cells.items()]


def _cell(row: Mapping[str, str]) -> str:
    if row["fits"] == "True":
        return _gb(row["peak_bytes"])
    more = f"; {_gb(row['peak_bytes_with'])} with `{row['with']}`" if row["with"] else ""
    return f"**{_gb(row['peak_bytes'])}**{more}"


def _gb(size: str) -> str:
    return f"{int(size) / 10**9:.1f}"


def main() -> None:
    """Print the rows of the recipes that the command line names; of all without names."""
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(HEADER)
    for name in sys.argv[1:] or BUILT_IN:
        for shape in MODELS:
            for tokens in LENGTHS:
                table.writerow(row(name, shape, tokens))
                sys.stdout.flush()


if __name__ == "__main__":
    main()
