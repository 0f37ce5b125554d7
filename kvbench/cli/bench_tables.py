"""Prints the tables of `kvbench bench`: speeds, the time per token for each stretch of the answers (N successive
tokens), evictions, the contents of the caches, and the time of attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbench.console import terminal
from kvbench.errors import counted

if TYPE_CHECKING:
    from kvbench.runner.bench.attention import AttentionTime
    from kvbench.runner.bench.results import Evictions, Measured
    from kvbench.runner.bench.setting import Load

SPEED = ("fresh tok/s", "warm tok/s", "slowest to fastest", "ratio", "decode tok/s", "first token")
CACHE = ("decoded by", "mean entries", "KV per sequence", "of the limit", "fitting")
EVICTIONS = ("evictions", "seconds", "each", "per token", "of decoding")
FOOT = (
    "Tokens per second of CPU time (on CUDA: of wall time), medians of rounds in which the systems take turns.",
    "fresh: the first of two generations (on a CPU, in a new process); warm: the second. See docs/speed.md.",
    "decode: speed after the first token of every sequence. ratio: warm speed divided by that of the first baseline.",
    "evictions: their number per sequence; seconds: time of all evictions in a generation; each: time to evict every "
    "sequence once; of decoding: share of the time of evictions and decoding. fitting: sequences that fit into memory "
    "by a run's plan.",
)
STRETCHES = (
    "rise: how much the cost rises from the second stretch to the last, as a share of the mean cost; read off a "
    "straight line through each stretch's cheapest round."
)

ATTENTION = (
    "attention: time that it takes in all layers, for one step in the middle of an answer; %: its memory traffic per "
    "second, divided by that of copying memory.",
    "fastest: the backend to set with --decode-attn. A run never chooses the fastest by itself, because then its "
    "answers would depend on the timing.",
)


def print_tables(results: Sequence[Measured], baselines: tuple[str, ...]) -> None:
    """Print the tables of each load (lengths of prompt and answer, number of sequences). baselines: names of systems;
    the speed of each system is also shown as a ratio to the speed of the first baseline."""
    for load in dict.fromkeys(r.load for r in results):
        rows = [r for r in results if r.load == load]
        base = next((r.warm.rate for r in rows if r.system in baselines[:1] and r.warm), None)
        print(_title(load))
        _table("speed", SPEED, [(r, _speed(r, base)) for r in rows])
        for r in rows:
            if why := r.failure or r.notice:
                print(f"{r.system}: {terminal.clean(why)}")
        _stretches([r for r in rows if r.warm and r.warm.costs])
        evicted = [(r, _evictions(r.evictions)) for r in rows if r.evictions and r.evictions.count]
        _table("evicting", EVICTIONS, evicted)
        gpu = ("GPU peak",) if any(r.peak_bytes is not None for r in rows) else ()
        _table("the cache", CACHE + gpu, [(r, _cache(r)) for r in rows if r.entries is not None])
        _attention([r for r in rows if r.attention])
    stretched = any(r.warm.costs for r in results if r.warm)
    attended = any(r.attention for r in results)
    for line in (*FOOT, *([STRETCHES] if stretched else ()), *(ATTENTION if attended else ())):
        print(line)


def _title(load: Load) -> str:
    sequences = "as many sequences as fit" if load.sequences is None else counted(load.sequences, "sequence")
    return f"{sequences}, prompts of {load.prompt:,} tokens, answers of {load.new_tokens:,}"


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
    """Print the time per token in the second of two generations ("warm"): a line per stretch of the answers and a
    column per system."""
    speeds = [r.warm for r in rows if r.warm]
    if not speeds:
        return
    names = [_name(r) for r in rows]
    ends = [f"to {cost.tokens:,}" for cost in speeds[0].costs]
    lines = [[end, *(f"{speed.costs[i].us:,.1f}" for speed in speeds)] for i, end in enumerate(ends)]
    rises = ["rise", *(_shown("{:+.1%}", speed.rise) for speed in speeds)]
    terminal.table(("warm µs per token", *names), [*lines, rises], right=tuple(names))


def _table(title: str, columns: tuple[str, ...], rows: list[tuple[Measured, list[str]]]) -> None:
    if rows:
        terminal.table((title, *columns), ((_name(r), *cells) for r, cells in rows), right=columns)


def _name(r: Measured) -> str:
    """Return a system's name, with notes in brackets. One note says that the weights are random. Another says how many
    sequences were decoded, if no number or a larger number was requested."""
    asked = r.load.sequences
    fewer = r.failure is None and asked is not None and r.decoded < asked
    facts = [*(["random weights"] if r.random_weights else []), *([f"{r.decoded} fit"] if fewer else [])]
    facts += [f"{r.decoded} sequences"] if asked is None and r.failure is None else []
    return f"{r.system} ({', '.join(facts)})" if facts else r.system


def _speed(r: Measured, base: float | None) -> list[str]:
    if r.fresh is None or r.warm is None:
        return ["out of memory", *["-"] * (len(SPEED) - 1)]
    return [
        f"{r.fresh.rate:,.0f}",
        f"{r.warm.rate:,.0f}",
        f"{r.warm.low:,.0f} to {r.warm.high:,.0f}",
        _shown("{:.2f}x", None if base is None else r.warm.rate / base),
        _shown("{:,.0f}", r.warm.decode),
        _shown("{:.3g} s", r.first_seconds),
    ]


def _evictions(evictions: Evictions) -> list[str]:
    return [
        f"{evictions.count:,.3g}",
        f"{evictions.seconds:,.3g} s",
        _shown("{:,.3g} ms", evictions.each and 1000 * evictions.each),
        f"{evictions.us:.3g} µs",
        f"{evictions.share:.1%}",
    ]


def _cache(r: Measured) -> list[str]:
    gpu = [] if r.peak_bytes is None else [f"{r.peak_bytes / 2**30:,.1f} GiB"]
    return [
        r.decoding or "-",
        _shown("{:,.0f}", r.entries),
        _shown("{:,.2f} MiB", r.kv_bytes and r.kv_bytes / 2**20),
        _shown("{:.0%}", r.roofline_share),
        f"{r.fitting:,}",
        *gpu,
    ]


def _shown(form: str, value: float | None) -> str:
    return "-" if value is None else form.format(value)
