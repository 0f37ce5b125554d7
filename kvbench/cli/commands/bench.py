"""``kvbench bench``: decoding speed under eviction beside other systems, measured by `kvbench.runner.bench`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from kvbench.cli import bench_options, options
from kvbench.cli.bench_figures import bench_figures
from kvbench.cli.bench_published import print_published, published_rows
from kvbench.cli.bench_tables import print_tables
from kvbench.cli.draw import draw
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
  kvbench bench --preset gkv-table2 --shape A --scale 32 --sequences 2
"""
Text = str | None


def _own(name: str, help: str, metavar: str) -> Any:
    """Declare an option whose default is in `bench_options.DEFAULTS`, and add the default to its help text."""
    default = bench_options.DEFAULTS.get(name)
    return options.plain(f"--{name}", f"{help} Default: {default}." if default else help, metavar)


@options.takes("method", "budget", "method_opt")
def bench(
    typed: Mapping[str, Any],
    preset: Annotated[Text, _own("preset", f"A paper's table: {', '.join(PRESETS)}.", "NAME")] = None,
    scale: Annotated[Text, _own("scale", "Divide the preset's numbers of tokens, budgets too, by N.", "N")] = None,
    baseline: Annotated[
        Text, _own("baseline", f"Systems to compare with: {', '.join(BASELINES)}, or none.", "NAME,NAME")
    ] = None,
    sequences: Annotated[
        Text, _own("sequences", "Numbers of sequences decoded side by side; max: as many as fit into memory.", "N,N")
    ] = None,
    samples: Annotated[Text, _own("samples", "Number of sequences that share a prompt.", "N")] = None,
    prompt: Annotated[Text, _own("prompt", "Tokens of each prompt.", "N,N")] = None,
    new_tokens: Annotated[Text, _own("new-tokens", "Tokens of each answer.", "N,N")] = None,
    stretch: Annotated[
        Text, _own("stretch", "Also show the time per token for each stretch of N generated tokens.", "N")
    ] = None,
    interval: Annotated[Text, _own("interval", "Generated tokens between evictions.", "N")] = None,
    shape: Annotated[Text, _own("shape", f"Shape of the model: {', '.join(SHAPES)}.", "NAME")] = None,
    device: Annotated[Text, _own("device", "auto, cpu, cuda.", "DEVICE")] = None,
    dtype: Annotated[Text, _own("dtype", f"{', '.join(DTYPES)}.", "DTYPE")] = None,
    memory: Annotated[
        Text, _own("memory", "Memory of the GPU to plan for; the command uses no more of a larger GPU.", "GIB")
    ] = None,
    decode_attn: Annotated[Text, options.same_as_run("decode_attn")] = None,
    compile_cpu: Annotated[bool, options.same_as_run("compile_cpu")] = False,
    threads: Annotated[Text, _own("threads", "Processor threads.", "N")] = None,
    plugin: options.Plugins = None,
    repeats: Annotated[Text, _own("repeats", "Number of timed rounds; tables show medians.", "N")] = None,
    plot: Annotated[Text, options.plain("--plot", "Also draw speeds into this folder, as SVG and PDF.", "DIR")] = None,
    json: Annotated[bool, options.plain("--json", "Last line of stdout is one JSON document.")] = False,
) -> None:
    """Measure decoding speed with random weights: methods, baselines, and the share of the hardware limit.

    Defaults: --method tova, --budget 128.
    """
    load_plugins(plugin or [])
    own = {
        "preset": preset,
        "scale": scale,
        "baseline": baseline,
        "sequences": sequences,
        "samples": samples,
        "prompt": prompt,
        "new-tokens": new_tokens,
        "stretch": stretch,
        "interval": interval,
        "shape": shape,
        "device": device,
        "dtype": dtype,
        "memory": memory,
        "decode-attn": decode_attn,
        "compile-cpu": compile_cpu,
        "threads": threads,
        "repeats": repeats,
    }
    asked = bench_options.read({**typed, **own})
    if plot is not None:
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
    if plot is not None:
        draw(bench_figures(setting, results), plot)
    if json:
        terminal.data(document)
    if ended is not None:
        raise ended
