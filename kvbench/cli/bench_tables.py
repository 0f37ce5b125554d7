"""Prints the tables of `kvbench bench`: speeds, costs per token in stretches of the answers, and what the caches
held."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbench.console import terminal

if TYPE_CHECKING:
    from kvbench.runner.bench.attention import AttentionTime
    from kvbench.runner.bench.rounds import Measured

SPEED = ("fresh tok/s", "warm tok/s", "slowest to fastest", "ratio", "decode tok/s", "first token")
CACHE = ("decoded by", "evicting", "per token", "mean entries", "KV per sequence", "of the limit")
FOOT = (
    "Tokens per second of CPU time (on CUDA: of wall time), medians of rounds in which the systems take turns.",
    "fresh: the first of two generations, on a CPU in a fresh process; warm: the second. See docs/speed.md.",
    "decode: speed after the first token of every sequence. ratio: warm speed divided by that of the first baseline.",
)
STRETCHES = (
    "rise: how much the cost rises from the second stretch to the last, as a share of the mean cost; a straight line "
    "through the cheapest rounds gives it."
)

ATTENTION = (
    "attention: time of all layers in a step in the middle of an answer; its share of the bandwidth of a copy.",
    "fastest: the backend to set with --decode-attn. A run never chooses by time: its answers would differ by chance.",
)


def print_tables(results: Sequence[Measured], baselines: tuple[str, ...]) -> None:
    """Print the tables for each number of sequences: the speed of all systems, what the engine's caches held and, if
    measured, the costs by stretch and the times of attention. baselines: the first is compared with."""
    for n in dict.fromkeys(r.sequences for r in results):
        rows = [r for r in results if r.sequences == n]
        base = next((r.warm.rate for r in rows if r.system in baselines[:1]), None)
        _table(f"{n} sequences", SPEED, [(r, _speed(r, base)) for r in rows])
        _stretches([r for r in rows if r.warm.costs])
        gpu = ("GPU peak",) if any(r.peak_bytes is not None for r in rows) else ()
        _table("the cache", CACHE + gpu, [(r, _cache(r)) for r in rows if r.entries is not None])
        _attention([r for r in rows if r.attention])
    stretched, attended = (any(values) for values in zip(*((r.warm.costs, r.attention) for r in results)))
    for line in (*FOOT, *([STRETCHES] if stretched else ()), *(ATTENTION if attended else ())):
        print(line)


def _attention(rows: Sequence[Measured]) -> None:
    """Print each backend's time for the attention of a decode step, and why a backend was not timed."""
    if not rows:
        return
    backends = [time.backend for time in rows[0].attention]
    columns = (*backends, "fastest")
    _table("attention of a step", columns, [(r, [*map(_attended, r.attention), r.fastest or "-"]) for r in rows])
    for backend, why in dict.fromkeys((t.backend, t.refused) for r in rows for t in r.attention if t.refused):
        print(f"{backend}: {terminal.clean(why)}")


def _attended(time: AttentionTime) -> str:
    if time.seconds is None or time.share is None:
        return "-"
    return f"{1000 * time.seconds:,.3g} ms, {time.share:.0%}"


def _stretches(rows: Sequence[Measured]) -> None:
    """Print the warm cost per token, a line per stretch of the answers and a column per system."""
    if not rows:
        return
    names = [_name(r) for r in rows]
    ends = [f"to {cost.tokens:,}" for cost in rows[0].warm.costs]
    lines = [[end, *(f"{r.warm.costs[i].us:,.1f}" for r in rows)] for i, end in enumerate(ends)]
    rises = ["rise", *(_shown("{:+.1%}", r.warm.rise) for r in rows)]
    terminal.table(("warm µs per token", *names), [*lines, rises], right=tuple(names))


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[Measured, list[str]]]) -> None:
    table = terminal.grid(title, *columns, right=columns)
    for r, cells in rows:
        table.add_row(_name(r), *cells)
    if rows:
        terminal.console().print(table)


def _name(r: Measured) -> str:
    return r.system if r.decoded == r.sequences else f"{r.system} ({r.decoded} fit)"


def _speed(r: Measured, base: float | None) -> list[str]:
    return [
        f"{r.fresh.rate:,.0f}",
        f"{r.warm.rate:,.0f}",
        f"{r.warm.low:,.0f} to {r.warm.high:,.0f}",
        _shown("{:.2f}x", None if base is None else r.warm.rate / base),
        _shown("{:,.0f}", r.warm.decode),
        _shown("{:.3g} s", r.first_seconds),
    ]


def _cache(r: Measured) -> list[str]:
    gpu = [] if r.peak_bytes is None else [f"{r.peak_bytes / 2**30:,.1f} GiB"]
    return [
        r.decoding or "-",
        f"{r.evict_share:.1%}",
        f"{r.evict_us:.3g} µs",
        f"{r.entries:,.0f}",
        _shown("{:,.2f} MiB", None if r.kv_bytes is None else r.kv_bytes / 2**20),
        _shown("{:.0%}", r.roofline_share),
        *gpu,
    ]


def _shown(form: str, value: float | None) -> str:
    return "-" if value is None else form.format(value)
