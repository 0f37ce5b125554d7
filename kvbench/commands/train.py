"""``kvbench train headkv|duo``: tables that methods need, made for one model. Imports torch only once it works."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from kvbench import terminal
from kvbench.errors import UserError, show
from kvbench.models import TINY, describe
from kvbench.problems import Problems
from kvbench.progress import Progress
from kvbench.registry import did_you_mean
from kvbench.store import check_out
from kvbench.values import parse, whole

if TYPE_CHECKING:
    from kvbench.train.head_tables import Made

EPILOG = """Examples:
  kvbench train headkv --model tiny --out tables
  kvbench train duo --model tiny --out tables --samples 8 --json
"""
KINDS = {"headkv": "importance of every query head", "duo": "how far every KV head looks"}
SHOWN = 8


def train(
    kind: Annotated[str, typer.Argument(metavar="headkv|duo", help="Method that needs the table.", show_default=False)],
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder for the two files.", show_default=False)],
    model: Annotated[str, typer.Option("--model", metavar="MODEL", help="Folder, hub name, or tiny.")] = TINY,
    samples: Annotated[str, typer.Option("--samples", metavar="N", help="Texts to read.")] = "32",
    seed: Annotated[str, typer.Option("--seed", metavar="N", help="Seed of the texts.")] = "0",
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Last line of stdout is one JSON document.", metavar="")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no table.", metavar="")] = False,
) -> None:
    """Make the table of heads that a method needs: estimated from the attention of a model, without training it.

    Writes DIR/headkv.safetensors (or duo.safetensors) and a card of the same name, .json; earlier ones are replaced.
    """
    if kind not in KINDS:
        raise UserError(f"cannot train {show(kind)}.{did_you_mean(kind, list(KINDS))} There are {', '.join(KINDS)}.")
    problems, numbers = Problems(), {}
    for name, raw, parser in (("samples", samples, whole(1)), ("seed", seed, whole(0, 2**64 - 1))):
        with problems.collect():
            numbers[name] = parse(f"--{name}", parser, raw)
    with problems.collect():
        describe(model)
    problems.stop()
    folder = check_out(out)

    from kvbench.train.head_tables import make

    progress = _Samples(quiet=quiet)
    progress.begin(numbers["samples"], 0)
    progress.cell(f"{kind} {model}")
    try:
        made = make(kind, model, folder, device=device, tick=_ticker(progress), **numbers)
    finally:
        progress.end()
    if not quiet:
        _print(kind, made)
    if json:
        terminal.data(made.card | {"path": str(made.path)})


class _Samples(Progress):
    """Samples instead of rows, and no cache."""

    def line(self) -> str:
        parts = [f"{self._done}/{self._total} samples", self._cell, self._speed, self._left()]
        return "  ".join(part for part in parts if part)


def _ticker(progress: Progress) -> Callable[[int, int], None]:
    return lambda done, tokens: progress.update(done, tokens, kv_bytes_now=0, kv_bytes_peak=0)


def _print(kind: str, made: Made) -> None:
    """The heads that stand out."""
    head, value = ("query head", "importance") if kind == "headkv" else ("KV head", "alpha")
    table = terminal.grid("layer", head, value, right=("layer", head, value))
    width = made.table.shape[1]
    for index in made.table.flatten().argsort(descending=True)[:SHOWN].tolist():
        table.add_row(str(index // width), str(index % width), f"{made.table.flatten()[index]:.3f}")
    terminal.console().print(table)
    more = made.table.numel() - SHOWN
    if more > 0:
        print(f"and {more} more heads")
    print(f"wrote {terminal.clean(str(made.path))} and {terminal.clean(made.path.with_suffix('.json').name)}")
