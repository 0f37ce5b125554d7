"""The figure of `kvbench bench --plot`: tokens per second against sequences, beside the baseline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvbench.report.plots import Figure, style
from kvbench.report.plots.curves import axis, curves

if TYPE_CHECKING:
    from kvbench.runner.bench import Measured, Setting

ABOUT = (
    "Decoded tokens per second of CPU time (on CUDA: of wall time), medians of {repeats} rounds. Bars and bands: the "
    "slowest and the fastest round. Shape {shape}, budget {budget}, interval {interval}, {new_tokens} new tokens. "
    "fresh: the first long generation of a process; warm: the second."
)


def bench_figure(setting: Setting, results: Sequence[Measured]) -> Figure:
    names = [setting.method] + ([setting.baseline] if setting.baseline != "none" else [])
    values = [
        {"kind": "cell", "dash": style.dash(p["method"], names), **p} for r in results for p in _points(setting, r)
    ]
    ticks = sorted({r.sequences for r in results})
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
    about = ABOUT.format(
        repeats=setting.repeats,
        shape=setting.shape,
        budget=setting.budget,
        interval=setting.interval,
        new_tokens=setting.new_tokens,
    )
    return Figure("bench", title, about, spec)


def _points(setting: Setting, result: Measured) -> Iterator[dict[str, Any]]:
    for panel, state in (("fresh", result.fresh), ("warm", result.warm)):
        sides = [(setting.method, state.kvbench, state.kvbench_spread)]
        if state.baseline is not None and state.baseline_spread is not None:
            sides.append((setting.baseline, state.baseline, state.baseline_spread))
        for name, speed, (slowest, fastest) in sides:
            yield {
                "panel": panel,
                "method": name,
                "x": result.sequences,
                "tokens_per_second": speed,
                "slowest": slowest,
                "fastest": fastest,
            }
