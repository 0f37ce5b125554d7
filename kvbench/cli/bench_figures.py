"""Makes the figures of `kvbench bench --plot`: each system's speed against the number of sequences, and each system's
time per generated token along the answers. Each system generates its answers twice (`kvbench.runner.bench`): "fresh" is
the first time, "warm" the second."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvbench.report.plots import Figure, style
from kvbench.report.plots.curves import axis, curves
from kvbench.report.plots.figure import Point, Spec

if TYPE_CHECKING:
    from kvbench.runner.bench.results import Measured
    from kvbench.runner.bench.setting import Setting

SPEED = (
    "Generated tokens per second of CPU time (on CUDA: of wall time), medians of {repeats} rounds. Bars and bands: "
    "from the slowest to the fastest round. "
)
COST = (
    "CPU time (on CUDA: wall time) per generated token in each stretch of {stretch} tokens of the answers, medians of "
    "{repeats} rounds. Bars and bands: from the cheapest to the dearest round. "
)
ABOUT = (
    "Shape {shape}, interval {interval}. fresh: the first of two generations (on a CPU, in a new process); warm: the "
    "second."
)
FIELDS = ("repeats", "shape", "interval", "stretch")


def bench_figures(setting: Setting, results: Sequence[Measured]) -> list[Figure]:
    """Return the figure of speeds. If the time per token was measured for each stretch of the answers (--stretch N: N
    successive tokens), also return the figure of these times."""
    figures = [_speeds(setting, results)]
    return [*figures, _costs(setting, results)] if any(r.warm.costs for r in results if r.warm) else figures


def _speeds(setting: Setting, results: Sequence[Measured]) -> Figure:
    ticks = sorted({r.decoded for r in results if r.decoded})
    x = axis(
        "x",
        "sequences decoded side by side",
        scale={"type": "log", "base": 2, "nice": False, "padding": 12},
        axis={"values": ticks, "format": "d", "grid": False},
    )
    values = [point for r in results for point in _rates(r)]
    return _figure(setting, "bench", "Decoding speed", SPEED, values, x, "tokens per second")


def _costs(setting: Setting, results: Sequence[Measured]) -> Figure:
    x = axis("x", "generated tokens per sequence", scale={"zero": True, "nice": False}, axis={"grid": False})
    values = [point for r in results for point in _stretches(r)]
    return _figure(setting, "cost", "Cost per generated token", COST, values, x, "microseconds per token")


def _figure(
    setting: Setting, name: str, title: str, about: str, values: Sequence[Point], x: Spec, measured: str
) -> Figure:
    names = setting.names()
    spec = curves(
        title,
        sorted(
            (p | {"kind": "cell", "dash": style.dash(p["method"], names)} for p in values), key=lambda p: p["panel"]
        ),
        x=x,
        y=axis("median", measured, scale={"zero": True, "nice": 5}, axis={"tickCount": 5}),
        looks=style.methods(names, names),
        low="low",
        high="high",
        hints=("method", "x"),
    )
    return Figure(name, title, (about + ABOUT).format(**{f: getattr(setting, f) for f in FIELDS}), spec)


def _rates(result: Measured) -> Iterator[dict[str, Any]]:
    """Yield the points of a system: its fresh and its warm speed, if they were measured. Each combination of prompt
    length and answer length has two panels: fresh and warm."""
    lengths = f"{result.load.prompt:,} + {result.load.new_tokens:,} tokens"
    for state, speed in (("fresh", result.fresh), ("warm", result.warm)):
        if speed is not None:
            rate = {"median": speed.rate, "low": speed.low, "high": speed.high}
            yield {"panel": f"{lengths}, {state}", "method": result.system, "x": result.decoded, **rate}


def _stretches(result: Measured) -> Iterator[dict[str, Any]]:
    """Yield a point with the time per token for each stretch of the answers, first fresh, then warm. Each load has two
    panels: fresh and warm."""
    load = result.load
    name = f"{load.prompt:,} + {load.new_tokens:,} tokens, {load.sequences or 'max'} sequences"
    for state, speed in (("fresh", result.fresh), ("warm", result.warm)):
        for cost in speed.costs if speed else ():
            where = {"panel": f"{name}, {state}", "method": result.system, "x": cost.tokens}
            yield where | {"median": cost.us, "low": cost.low, "high": cost.high}
