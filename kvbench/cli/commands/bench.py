"""``kvbench bench``: decoding speed under eviction beside other systems, measured by `kvbench.runner.bench`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from kvbench.cli import options
from kvbench.cli.bench_figures import bench_figures
from kvbench.cli.bench_tables import print_tables
from kvbench.cli.checks import refuse_oracle
from kvbench.cli.draw import draw
from kvbench.cli.request import chosen
from kvbench.config.parsers import Parser, choice, parse, split, whole
from kvbench.config.plugins import load_plugins
from kvbench.config.run_config import MethodChoice
from kvbench.config.settings import DEFAULTS, DTYPES, PARSERS
from kvbench.console import terminal
from kvbench.console.problems import Problems
from kvbench.console.progress import step
from kvbench.errors import UserError
from kvbench.eviction import choose
from kvbench.eviction.budget import Budget
from kvbench.eviction.options import check_budget
from kvbench.report import plots
from kvbench.runner.bench.shapes import BASELINES, LONGEST, SHAPES

EPILOG = """Examples:
  kvbench bench
  kvbench bench --method full,gkv --budget 128,256 --sequences 1,8 --new-tokens 512 --json
  kvbench bench --method snapkv-decode --method-opt window=8 --shape B --dtype bfloat16 --baseline none
  kvbench bench --sequences 2 --new-tokens 256 --stretch 64 --plot figures
  kvbench bench --shape qwen3-4b --method full,tova --budget 1024 --prompt 8192 --sequences 96
"""
AXES = {"method": ["tova"], "budget": ["128"]}


@options.takes("method", "budget", "method_opt")
def bench(
    typed: Mapping[str, Any],
    baseline: Annotated[
        str,
        typer.Option(
            "--baseline", metavar="NAME,NAME", help=f"Systems to compare with: {', '.join(BASELINES)}, or none."
        ),
    ] = "transformers",
    sequences: Annotated[
        str, typer.Option("--sequences", metavar="N,N", help="Numbers of sequences decoded side by side.")
    ] = "1,8,32",
    samples: Annotated[
        str, typer.Option("--samples", metavar="N", help="Number of sequences that share a prompt.")
    ] = "1",
    prompt: Annotated[str, typer.Option("--prompt", metavar="N", help="Tokens of each prompt.")] = "64",
    new_tokens: Annotated[str, typer.Option("--new-tokens", metavar="N", help="Tokens of each answer.")] = "1024",
    stretch: Annotated[
        str | None, options.plain("--stretch", "Also show the cost per token in stretches of N tokens.", "N")
    ] = None,
    interval: Annotated[
        str, typer.Option("--interval", metavar="N", help="Generated tokens between evictions.")
    ] = "32",
    shape: Annotated[
        str, typer.Option("--shape", metavar="NAME", help=f"Shape of the model: {', '.join(SHAPES)}.")
    ] = "A",
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="auto, cpu, cuda.")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", metavar="DTYPE", help=f"{', '.join(DTYPES)}.")] = "auto",
    decode_attn: Annotated[str | None, options.same_as_run("decode_attn")] = None,
    threads: Annotated[str, typer.Option("--threads", metavar="N", help="Processor threads.")] = "1",
    plugin: options.Plugins = None,
    repeats: Annotated[
        str, typer.Option("--repeats", metavar="N", help="Number of timed rounds; tables show medians.")
    ] = "5",
    plot: Annotated[
        str | None, options.plain("--plot", "Also draw the speeds into this folder, as SVG and PDF.", "DIR")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Last line of stdout is one JSON document.", metavar="")] = False,
) -> None:
    """Measure decoding speed with random weights: methods, baselines, and the share of the hardware limit.

    Defaults: --method tova, --budget 128.
    """
    load_plugins(plugin or [])
    values = _parsed(
        {name: typed[name] or default for name, default in AXES.items()} | {"method_opt": typed["method_opt"]},
        {"sequences": sequences, "baselines": baseline},
        {
            "samples": (whole(1), samples),
            **({} if stretch is None else {"stretch": (whole(1), stretch)}),
            "prompt": (whole(1), prompt),
            "new-tokens": (whole(1), new_tokens),
            "interval": (whole(1), interval),
            "threads": (whole(1), threads),
            "repeats": (whole(1), repeats),
            "dtype": (choice(*DTYPES), dtype),
            "decode-attn": (PARSERS["decode_attn"], decode_attn or DEFAULTS["decode_attn"]),
            "shape": (choice(*SHAPES), shape),
        },
    )
    if plot is not None:
        plots.check()

    from kvbench.runner.bench.rounds import as_json
    from kvbench.runner.bench.rounds import bench as measure
    from kvbench.runner.bench.setting import Setting

    setting = Setting(device=device, **values)
    results = measure(setting, step)
    print_tables(results, setting.baselines)
    if plot is not None:
        draw(bench_figures(setting, results), plot)
    if json:
        terminal.data(as_json(setting, results))


def _parsed(axes: Mapping[str, Any], lists: Mapping[str, str], raw: Mapping[str, tuple[Parser, str]]) -> dict[str, Any]:
    """Parse and check all options. Return their values, each by the name of its field in `Setting`.

    axes: the methods, budgets and method options that the user typed. lists: the texts of --sequences and --baseline.
    raw: the parser and the text of every other option.
    """
    problems = Problems()
    values: dict[str, Any] = {}
    for name, (parser, text) in raw.items():
        with problems.collect():
            values[name.replace("-", "_")] = parse(f"--{name}", parser, text)
    with problems.collect():
        members = split("--sequences", lists["sequences"], "Example: --sequences 1,8.")
        values["sequences"] = tuple(dict.fromkeys(parse("--sequences", whole(1), member) for member in members))
    with problems.collect():
        values["baselines"] = _baselines(lists["baselines"])
    values["methods"], values["budgets"] = chosen(axes, problems)
    for method in values["methods"]:
        for budget in values["budgets"]:
            with problems.collect():
                _check(method, budget)
    problems.stop()
    if values.get("stretch", 0) > values["new_tokens"]:
        raise UserError(
            f"--stretch {values['stretch']} is longer than the answers; it must be at most --new-tokens, "
            f"{values['new_tokens']}."
        )
    if (longest := values["prompt"] + values["new_tokens"]) > LONGEST:
        raise UserError(f"--prompt and --new-tokens make {longest} tokens; together they must be at most {LONGEST}.")
    return values


def _baselines(text: str) -> tuple[str, ...]:
    names = split("--baseline", text, "Example: --baseline transformers,continuous.")
    named = [str(parse("--baseline", choice(*BASELINES, "none"), name)) for name in names]
    if "none" in named and len(named) > 1:
        raise UserError(f"--baseline {text}: 'none' cannot be joined with other names; give it alone.")
    return tuple(name for name in dict.fromkeys(named) if name != "none")


def _check(method: MethodChoice, budget: Budget) -> None:
    instance = choose.make(method.name, dict(method.options))
    refuse_oracle(method.name, instance)
    if instance.takes_budget:
        check_budget(method.name, instance, budget)
