"""Prints a paper's numbers and ours for `kvbench bench --preset`, side by side in separate columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvbench.console import terminal
from kvbench.runner.bench.presets import Column, Preset, short

if TYPE_CHECKING:
    from kvbench.runner.bench.results import Evictions, Measured
    from kvbench.runner.bench.setting import Setting

    # A function that returns our figure of a column. row: the measurement of a method. full: the full cache's
    # measurement at the same load.
    Figure = Callable[[Measured, Measured | None], float | None]

Row = dict[str, Any]  # keys: system, theirs (its name in the paper), load, notes; ours, published: a figure per column
OOM = "OOM"


def _rate(row: Measured, full: Measured | None) -> float | None:
    return None if row.warm is None else row.warm.rate


def _rate_over_full(row: Measured, full: Measured | None) -> float | None:
    return None if full is None or full.warm is None or row.warm is None else row.warm.rate / full.warm.rate


def _first_over_full_percent(row: Measured, full: Measured | None) -> float | None:
    if full is None or not full.first_seconds or row.first_seconds is None:
        return None
    return 100 * (row.first_seconds / full.first_seconds - 1)


def _evict_percent(row: Measured, full: Measured | None) -> float | None:
    return None if row.evictions is None or not row.seconds else 100 * row.evictions.seconds / row.seconds


def _evicting(figure: Callable[[Evictions], float | None]) -> Figure:
    return lambda row, full: None if row.evictions is None else figure(row.evictions)


OURS: Mapping[str, Figure] = {  # by `Column.ours`
    "sequences": lambda row, full: row.decoded,
    "rate": _rate,
    "rate_over_full": _rate_over_full,
    "seconds": lambda row, full: row.seconds,
    "first": lambda row, full: row.first_seconds,
    "first_over_full_percent": _first_over_full_percent,
    "evict_seconds": _evicting(lambda evictions: evictions.seconds),
    "evict_percent": _evict_percent,
    "evict_each_ms": _evicting(lambda evictions: evictions.each and 1000 * evictions.each),
    "evict_share_percent": _evicting(lambda evictions: 100 * evictions.share),
}


def published_rows(preset: Preset, setting: Setting, results: Sequence[Measured], scale: int) -> list[Row]:
    """Return a row per method, budget and load (lengths of prompt and answer, number of sequences). In a row, `ours`
    maps column heads to our figures, and `published` maps column heads to the paper's.

    scale: the paper's numbers of tokens are `scale` times ours. Our figure is "OOM" if the requested number of
    sequences did not fit into memory. Our figure is None if we did not measure it, and the paper's is None if the paper
    does not print it.
    """
    methods = {member.name: member for member in setting.members}
    full = {r.load: r for r in results if r.system == "full" and _whole(r)}
    rows: list[Row] = []
    for r in results:
        if (member := methods.get(r.system)) is None:  # a baseline
            continue
        budget = member.budget * scale if isinstance(member.budget, int) else None
        tokens = {"prompt": r.load.prompt * scale, "new_tokens": r.load.new_tokens * scale}
        where = setting.shape, member.method.label, budget, tokens | {"sequences": r.load.sequences}
        found = {column.head: preset.printed(column, *where) for column in preset.columns}
        theirs = preset.their_name(member.method.label)
        rows.append(
            {
                "system": r.system,
                "theirs": theirs and " ".join([theirs, *([short(budget)] if budget else [])]),
                "load": r.load._asdict(),
                "ours": {c.head: OURS[c.ours](r, full.get(r.load)) if _whole(r) else OOM for c in preset.columns},
                "published": {head: row and row.value for head, row in found.items()},
                "notes": list(dict.fromkeys(row.notes for row in found.values() if row and row.notes)),
            }
        )
    return rows


def _whole(r: Measured) -> bool:
    """Return whether the requested number of sequences fitted into memory in the measurement `r`."""
    return r.failure is None and r.load.sequences in (None, r.decoded)


def print_published(preset: Preset, setting: Setting, rows: Sequence[Row], scale: int, device: str) -> None:
    """Print our figures and the paper's in separate columns, then lines on how the paper and we measured, and further
    numbers of the paper."""
    heads = [f"{side}: {column.head}" for column in preset.columns for side in ("ours", "paper")]
    print(f"{preset.paper}: {preset.what}")
    names = ("system", "tokens", "in the paper")
    table = terminal.grid(*names, *heads, right=tuple(heads), whole=names)
    for r in rows:
        table.add_row(r["system"], _load(r["load"]), r["theirs"] or "-", *_figures(preset.columns, r))
    terminal.console().print(table)
    tables = " and ".join(dict.fromkeys(column.table for column in preset.columns))
    print(f"paper: {preset.paper}, {tables}, measured by its own code. {preset.unknown}")
    for note in dict.fromkeys(note for r in rows for note in r["notes"]):
        print(f"paper's notes: {note}.")
    scaled = "" if scale == 1 else f" All numbers of tokens are the paper's divided by {scale}."
    print(f"ours: shape {setting.shape} with random weights on {device}, {setting.dtype}.{scaled}")
    print("-: the paper prints no such number, or kvbench's list lacks it. OOM: out of memory with so many sequences.")
    for other in preset.numbers(*preset.also):
        print(
            f"also printed: {other.method}, {other.task}, {other.metric}: {other.value} {other.unit} ({other.notes})."
        )


def _load(load: Mapping[str, int | None]) -> str:
    return f"{load['prompt']:,} + {load['new_tokens']:,} x {load['sequences'] or 'max'}"


def _figures(columns: Sequence[Column], row: Row) -> list[str]:
    """Return our figure and the paper's for each column."""
    return [_shown(column.form, row[side][column.head]) for column in columns for side in ("ours", "published")]


def _shown(form: str, value: float | str | None) -> str:
    """Return a figure formatted by `form`. Texts that are not numbers, such as "OOM", stay unchanged."""
    try:
        return "-" if value is None else form.format(float(value))
    except ValueError:
        return str(value)
