"""``kvbench bench``: decoding speed under eviction beside other systems, measured by `kvbench.runner.bench`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from kvbench.cli import bench_options
from kvbench.cli.bench_figures import bench_figures
from kvbench.cli.bench_published import print_published, published_rows
from kvbench.cli.bench_tables import print_tables
from kvbench.cli.draw import draw
from kvbench.cli.options import LastLine, Parameter, Plugins, Text, declare, option, same_as_run, takes
from kvbench.config.plugins import load_plugins
from kvbench.config.settings import DTYPES
from kvbench.console import terminal
from kvbench.console.progress import step
from kvbench.report import plots
from kvbench.runner.bench.presets import PRESETS
from kvbench.runner.bench.shapes import BASELINES, SHAPES

if TYPE_CHECKING:
    from kvbench.runner.bench.results import Measured

EPILOG = """Examples:
  kvbench bench
  kvbench bench --method full,gkv --budget 128,256 --sequences 1,8 --new-tokens 512 --json
  kvbench bench --method snapkv-decode --method-opt window=8 --shape B --dtype bfloat16 --baseline none
  kvbench bench --sequences 2 --new-tokens 256 --stretch 64 --plot figures
  kvbench bench --shape qwen3-4b --method full,tova --budget 1024 --prompt 8192 --sequences max --memory 80
  kvbench bench --preset foresightkv-table3
  kvbench bench --preset gkv-table2 --shape A --scale 16 --sequences 2
"""


def _text(name: str, help: str, metavar: str) -> Parameter:
    """Return an option of this command. Its help text ends with its default in `bench_options.DEFAULTS`, if any."""
    default = bench_options.DEFAULTS.get(name.replace("_", "-"))
    return option(name, Text, f"{help} Default: {default}." if default else help, metavar=metavar)


OWN = (
    _text("preset", f"A paper's table: {', '.join(PRESETS)}.", "NAME"),
    _text("scale", "Divide the preset's numbers of tokens, budgets too, by N.", "N"),
    _text("baseline", f"Systems to compare with: {', '.join(BASELINES)}, or none.", "NAME,NAME"),
    _text("sequences", "Numbers of sequences decoded side by side; max: as many as fit into memory.", "N,N"),
    _text("samples", "Number of sequences that share a prompt.", "N"),
    _text("prompt", "Tokens of each prompt.", "N,N"),
    _text("new_tokens", "Tokens of each answer.", "N,N"),
    _text("stretch", "Also show the time per token for each stretch of N generated tokens.", "N"),
    _text("interval", "Generated tokens between evictions.", "N"),
    _text("shape", f"Shape of the model: {', '.join(SHAPES)}.", "NAME"),
    _text("device", "auto, cpu, cuda.", "DEVICE"),
    _text("dtype", f"{', '.join(DTYPES)}.", "DTYPE"),
    _text("memory", "Memory of the GPU to plan for; the command uses no more of a larger GPU.", "GIB"),
    declare("decode_attn", Annotated[Text, same_as_run("decode_attn")]),
    declare("compile_cpu", Annotated[bool, same_as_run("compile_cpu")], False),
    _text("threads", "Processor threads.", "N"),
    declare("plugin", Plugins),
    _text("repeats", "Number of timed rounds; tables show medians.", "N"),
    _text("plot", "Also draw speeds into this folder, as SVG and PDF.", "DIR"),
    declare("json", LastLine, False),
)


@takes(*OWN, "method", "budget", "method_opt")
def bench(typed: Mapping[str, Any]) -> None:
    """Measure decoding speed with random weights: methods, baselines, and the share of the hardware limit.

    Defaults: --method tova, --budget 128.
    """
    load_plugins(typed["plugin"] or [])
    asked = bench_options.read(typed)
    if typed["plot"] is not None:
        plots.check()

    from kvbench.runner.bench.results import as_json
    from kvbench.runner.bench.rounds import bench as measure
    from kvbench.runner.bench.setting import Member, Setting

    setting = Setting(members=tuple(Member(*pair) for pair in asked.pairs), **asked.values)
    results: list[Measured] = []
    ended: BaseException | None = None
    try:
        for row in measure(setting, step):
            results.append(row)
    except BaseException as error:  # a signal or a failure: the tables show what was measured before it
        if not results:
            raise
        ended = error
    document = as_json(setting, results)
    print_tables(results, setting.baselines)
    if asked.preset is not None:
        rows = published_rows(asked.preset, setting, results, asked.scale)
        print_published(asked.preset, setting, rows, asked.scale, document["device"])
        document["published"] = rows
    if typed["plot"] is not None:
        draw(bench_figures(setting, results), typed["plot"])
    if typed["json"]:
        terminal.data(document)
    if ended is not None:
        raise ended
