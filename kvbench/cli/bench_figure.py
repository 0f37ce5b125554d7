"""The figure of `kvbench bench --plot`: the speed of each system over the number of sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvbench.report.plots import Figure, style
from kvbench.report.plots.curves import axis, curves

if TYPE_CHECKING:
    from kvbench.runner.bench.rounds import Measured
    from kvbench.runner.bench.setting import Setting

ABOUT = (
    "Generated tokens per second of CPU time (on CUDA: of wall time), medians of {repeats} rounds. Bars and bands: the "
    "slowest and the fastest round. Shape {shape}, interval {interval}, prompts of {prompt} tokens, {new_tokens} new "
    "tokens. fresh: the first long generation of a process; warm: the second."
)

FIELDS = ("repeats", "shape", "interval", "prompt", "new_tokens")


def bench_figure(setting: Setting, results: Sequence[Measured]) -> Figure:
    names = setting.names()
    values = [{"kind": "cell", "dash": style.dash(p["method"], names), **p} for r in results for p in _points(r)]
    ticks = sorted({r.decoded for r in results})
    scale = {"type": "log", "base": 2, "nice": False, "padding": 12}
    spec = curves(
        title := "Decoding speed",
        sorted(values, key=lambda p: p["panel"]),
        x=axis(
            "x", "sequences decoded side by side", scale=scale, axis={"values": ticks, "format": "d", "grid": False}
        ),
        y=axis("tokens_per_second", "tokens per second", scale={"zero": True, "nice": 5}, axis={"tickCount": 5}),
        looks=style.methods(names, names),
        low="slowest",
        high="fastest",
        hints=("method", "x"),
    )
    return Figure("bench", title, ABOUT.format(**{f: getattr(setting, f) for f in FIELDS}), spec)


def _points(result: Measured) -> Iterator[dict[str, Any]]:
    for panel, speed in (("fresh", result.fresh), ("warm", result.warm)):
        yield {
            "panel": panel,
            "method": result.system,
            "x": result.decoded,
            "tokens_per_second": speed.rate,
            "slowest": speed.low,
            "fastest": speed.high,
        }
