"""``kvbench bench``: decoding speed under eviction beside a baseline, measured by `kvbench.runner.bench`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvbench.cli import options
from kvbench.cli.bench_figure import bench_figure
from kvbench.cli.checks import refuse_oracle
from kvbench.cli.draw import draw
from kvbench.config.parsers import choice, parse, split, whole
from kvbench.config.plugins import load_plugins
from kvbench.config.settings import DTYPES
from kvbench.console import terminal
from kvbench.console.problems import Problems
from kvbench.console.progress import step
from kvbench.eviction import choose
from kvbench.eviction.options import check_budget
from kvbench.report import plots

EPILOG = """Examples:
  kvbench bench
  kvbench bench --method gkv --sequences 1,8,32 --new-tokens 512 --json
  kvbench bench --shape B --dtype bfloat16 --baseline none
  kvbench bench --sequences 1,4 --new-tokens 256 --plot figures
"""


def bench(
    method: Annotated[str, typer.Option("--method", metavar="NAME", help="Eviction method.")] = "tova",
    baseline: Annotated[str, typer.Option("--baseline", metavar="NAME", help="transformers or none.")] = "transformers",
    sequences: Annotated[str, typer.Option("--sequences", metavar="N,N", help="Decoded side by side.")] = "1,8,32",
    new_tokens: Annotated[str, typer.Option("--new-tokens", metavar="N", help="Tokens of each sequence.")] = "1024",
    prompt: Annotated[str, typer.Option("--prompt", metavar="N", help="Tokens of each prompt.")] = "64",
    budget: Annotated[str, typer.Option("--budget", metavar="N", help="KV entries per layer and head.")] = "128",
    interval: Annotated[str, typer.Option("--interval", metavar="N", help="Tokens between evictions.")] = "32",
    shape: Annotated[
        str, typer.Option("--shape", metavar="NAME", help="Model: A, B (small), qwen3-4b or r1-distill-qwen-7b.")
    ] = "A",
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda.")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", metavar="DTYPE", help=f"{', '.join(DTYPES)}.")] = "auto",
    threads: Annotated[str, typer.Option("--threads", metavar="N", help="Processor threads.")] = "1",
    plugin: options.Plugins = None,
    repeats: Annotated[str, typer.Option("--repeats", metavar="N", help="Timed rounds; medians are shown.")] = "5",
    plot: Annotated[str | None, options.plain("--plot", "Also draw the speeds there, SVG and PDF.", "DIR")] = None,
    json: Annotated[bool, typer.Option("--json", help="Last line of stdout is one JSON document.", metavar="")] = False,
) -> None:
    """Measure decoding speed with random weights: the engine, a baseline, and the share of the hardware limit."""
    load_plugins(plugin or [])
    values = _parsed(
        method,
        sequences,
        {
            "new-tokens": (whole(1), new_tokens),
            "prompt": (whole(1), prompt),
            "budget": (whole(1), budget),
            "interval": (whole(1), interval),
            "threads": (whole(1), threads),
            "repeats": (whole(1), repeats),
            "dtype": (choice(*DTYPES), dtype),
            "baseline": (choice("transformers", "none"), baseline),
        },
    )

    if plot is not None:
        plots.check()

    from kvbench.runner.bench import Setting, as_json
    from kvbench.runner.bench import bench as measure

    setting = Setting(shape=shape, device=device, **values)
    results = measure(setting, step)
    _print(results, setting.method)
    if plot is not None:
        draw([bench_figure(setting, results)], plot)
    if json:
        terminal.data(as_json(setting, results))


def _parsed(method: str, sequences: str, raw: dict[str, tuple[Any, str]]) -> dict[str, Any]:
    """The parsed and checked options, keyed by field of `Setting`. raw: per option, its parser and the typed text."""
    problems = Problems()
    values: dict[str, Any] = {}
    for name, (parser, text) in raw.items():
        with problems.collect():
            values[name.replace("-", "_")] = parse(f"--{name}", parser, text)
    with problems.collect():
        members = split("--sequences", sequences, "Example: --sequences 1,8.")
        values["sequences"] = tuple(parse("--sequences", whole(1), member) for member in members)
    with problems.collect():
        values["method"] = choose.canonical(method)
        instance = choose.make(method, {})
        refuse_oracle(values["method"], instance)
        if instance.takes_budget and "budget" in values:
            check_budget(values["method"], instance, values["budget"])
    problems.stop()
    return values


def _print(results: list[Any], method: str) -> None:
    numbers = ("sequences", "process", f"{method} tok/s", "baseline tok/s", "ratio", "evicting", "of the limit")
    table = terminal.grid(*numbers, right=numbers)
    for r in results:
        shares = f"{r.evict_share:.1%}", f"{r.roofline_share:.0%}"
        for name, state in (("fresh", r.fresh), ("warm", r.warm)):
            low, high = state.kvbench_spread
            baseline = "-" if state.baseline is None else f"{state.baseline:,.0f}"
            ratio = "-" if state.ratio is None else f"{state.ratio:.2f}x"
            speed = f"{state.kvbench:,.0f} ({low:,.0f} to {high:,.0f})"
            first = name == "fresh"
            table.add_row(
                str(r.sequences) if first else "", name, speed, baseline, ratio, *(shares if first else ("", ""))
            )
    terminal.console().print(table)
    print("Tokens per second of CPU time (on CUDA: of wall time), medians of rounds in which the systems take turns.")
    print("fresh: the first long generation of a process; warm: the second. docs/speed.md says why they differ.")
