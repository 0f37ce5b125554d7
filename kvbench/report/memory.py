"""Memory: the bytes that a budget names beside the bytes that were measured.

    report = MemoryReport.make(load([Path("results/demo")]))
    report.tables[0].cells[0].ratio                # measured / nominal, keys and values only
    FORMATS["markdown"](report)

What a budget names (nominal) are keys and values of budget + interval entries in every layer and KV head, as many as
there are just before an eviction. Where nothing bounds what is generated it is the budget and all of that. A
sequence is never longer than it is: nominal stops at its tokens. How many tokens the later questions of a conversation
have is not in its row; the full cache held them all and says it for every method. Sliding-window layers, which no
method touches, count their windows on both sides.

Measured are the live keys and values at the peak, from the rows. Pages of the paged layout may be part-filled; beyond
a page a head and 5% a cell is marked. What a method stores beside keys and values is a column of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvbench.budget import Budget, label
from kvbench.progress import size
from kvbench.report.cells import cells_of
from kvbench.report.load import RUN, Loaded
from kvbench.report.render import Block
from kvbench.report.tables import shared_options
from kvbench.store import manifest

if TYPE_CHECKING:
    import pandas as pd

PAGE = 16  # entries; that of kvbench.engine.paged, which needs torch
SLACK = 1.05
NOTHING = "-"
UNBOUNDED = (
    "* does not bound what is generated (evicts the prompt only, or in some heads only): nominal is the budget and all "
    "that was generated."
)
LATER = (
    "The full cache was not run on these conversations, so how long their later questions are is not known: nominal is "
    "without them, and no cell of theirs is marked."
)
OVER = f"! above {SLACK} times nominal and a page of {PAGE} entries for each head, or {SLACK} times its entries."


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer as run.json has it. `window`: entries that a sliding-window layer keeps."""

    kv_heads: int
    entry_bytes: int  # keys and values of one entry in one head
    window: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCell:
    """One method at one budget on one task. Numbers that the rows or the run do not have are NaN."""

    method: str
    budget: Budget | None
    interval: int | None
    decode_bounded: bool
    evicts: bool
    nominal_entries: float  # per layer and KV head
    entries_after_evict: float
    entries_peak: float
    nominal_bytes: float
    measured_bytes: float
    ratio: float
    largest_ratio: float  # over all samples
    allowed_bytes: float
    beside_bytes: float
    beside_share: float  # of measured_bytes
    reading_bytes: float
    over: bool
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTable:
    group: str
    task: str
    cells: list[MemoryCell]
    notes: list[str]

    @property
    def title(self) -> str:
        return ", ".join(filter(None, (self.task, self.group)))


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Every cell's memory, a table for each task."""

    name: ClassVar[str] = "memory"
    about: ClassVar[str] = (
        "Bytes of one sequence, the sample that held most. Nominal: keys and values of budget + interval entries in "
        "every layer and KV head, at most those of the whole sequence. Measured: live keys and values at the peak of "
        "decoding; a head's last page may be part-filled. Beside: positions, method columns, stored queries and "
        "states, as a share of measured keys and values. While reading: everything held at the peak of reading the "
        "prompt."
    )
    loaded: Loaded
    tables: list[MemoryTable]

    @classmethod
    def make(cls, loaded: Loaded) -> MemoryReport:
        layers = {run["run"]: read_layers(Path(run["path"])) for run in loaded.runs}
        shared = shared_options(loaded)
        tables = []
        for group in loaded.groups:
            rows = _with_bytes(group.rows, layers)
            cells = [_cell(name, budget, part) for name, budget, part in cells_of(rows, shared)]
            notes = [*_notes(cells), *([LATER] if rows["later"].isna().any() else [])]
            tables.append(MemoryTable(group=group.label, task=group.task, cells=cells, notes=notes))
        return cls(loaded, tables)

    def blocks(self, plus_minus: str) -> Iterator[Block]:
        for table in self.tables:
            yield Block(title=table.title, grids=[(columns(), table.cells)], notes=table.notes)

    def lines(self) -> list[dict[str, Any]]:
        return [flat(table, cell) for table in self.tables for cell in table.cells]

    def data(self) -> dict[str, Any]:
        tables = [
            {"group": t.group, "task": t.task, "notes": t.notes, "cells": [flat(t, cell) for cell in t.cells]}
            for t in self.tables
        ]
        return {"tables": tables}


def read_layers(path: Path) -> list[Layer] | None:
    """The model's layers from a run's run.json; None where it does not say, as in runs of older versions."""
    folder = path if path.is_dir() else path.parent
    if not (folder / manifest.NAME).is_file():
        return None
    found = manifest.read(folder)["environment"].get("kv_cache")
    if found is None:
        return None
    return [
        Layer(
            kv_heads=layer["kv_heads"],
            entry_bytes=(layer["head_dim"] + layer["value_dim"]) * found["element_bytes"],
            window=layer["window"],
        )
        for layer in found["layers"]
    ]


def _with_bytes(rows: pd.DataFrame, layers: Mapping[str, Sequence[Layer] | None]) -> pd.DataFrame:
    """Rows with what is nominal, measured and allowed of each; NaN for those that failed before anything was held."""
    rows = rows.assign(later=_later(rows))
    longest = _number((rows["prompt_tokens"] + rows["max_new_tokens"] + rows["later"].fillna(0)).max())
    made = [_row(row, layers[row[RUN]], longest) for row in rows.to_dict("records")]
    names = ("nominal_entries", "nominal", "measured", "allowed", "ratio", "over", "shown")
    return rows.assign(**{name: [values[name] for values in made] for name in names})


def _later(rows: pd.DataFrame) -> pd.Series:
    """Tokens of each conversation's later questions: what the full cache held beyond prompt and answers.

    0 where there are no later questions, null where the full cache was not run.
    """
    talks = rows["multi_turn_cache"].notna()
    full = rows[talks & rows["interval"].isna()]
    beyond = full["entries_peak"] - (full["prompt_tokens"] + full["output_tokens"] - 1)
    known = beyond.clip(lower=0).groupby(full["doc_id"], observed=True).max()
    return rows["doc_id"].map(known).astype(float).where(talks, 0.0)


def _row(row: Mapping[str, Any], layers: Sequence[Layer] | None, longest: float) -> dict[str, Any]:
    budget, interval, prompt, generated, peak, total, beside = (
        _number(row[name])
        for name in (
            "budget", "interval", "prompt_tokens", "output_tokens", "entries_peak", "kv_bytes_peak", "kv_bytes_extra",
        )
    )  # fmt: skip
    later = _number(row["later"])
    known = not math.isnan(later)
    sequence = prompt + generated - 1 + (later if known else 0)  # the last token drawn is never run
    bounded = _is(row["decode_bounded"])
    entries = sequence
    if not math.isnan(budget):
        entries = min(sequence, budget + interval if bounded else min(budget, prompt) + sequence - prompt)
    nominal = page = math.nan
    if layers is not None:
        # A window that no sequence outgrows is none, as in the engine.
        rings = [g for g in layers if g.window is not None and g.window < longest]
        others = [g for g in layers if g not in rings]
        nominal = entries * sum(g.kv_heads * g.entry_bytes for g in others)
        nominal += sum(min(sequence, g.window or 0) * g.kv_heads * g.entry_bytes for g in rings)
        page = PAGE * sum(g.kv_heads * g.entry_bytes for g in others)
    measured, allowed = total - beside, SLACK * nominal + page
    # A question that is read after the compression comes on top of the budget, by a length that rows do not have.
    judged = bounded and row["compress"] != "query-agnostic" and known
    over = judged and (measured > allowed or peak > SLACK * entries)
    ratio = measured / nominal if nominal else math.nan
    shown = (over, *(-1.0 if math.isnan(x) else x for x in (measured, ratio)))  # the largest stands for its cell
    return {
        "nominal_entries": entries, "nominal": nominal, "measured": measured, "allowed": allowed, "ratio": ratio,
        "over": over, "shown": shown,
    }  # fmt: skip


def _cell(method: str, budget: Budget | None, rows: pd.DataFrame) -> MemoryCell:
    shown = max(rows.to_dict("records"), key=lambda row: row["shown"])
    measured, nominal, beside = shown["measured"], shown["nominal"], _number(shown["kv_bytes_extra"])
    interval = _number(shown["interval"])
    return MemoryCell(
        method=method,
        budget=budget,
        interval=None if math.isnan(interval) else int(interval),
        decode_bounded=_is(shown["decode_bounded"]),
        evicts=not math.isnan(interval),
        nominal_entries=shown["nominal_entries"],
        entries_after_evict=_number(shown["entries_after_evict"]),
        entries_peak=_number(shown["entries_peak"]),
        nominal_bytes=nominal,
        measured_bytes=measured,
        ratio=shown["ratio"],
        largest_ratio=float(rows["ratio"].max()),
        allowed_bytes=shown["allowed"],
        beside_bytes=beside,
        beside_share=beside / measured if measured else math.nan,
        reading_bytes=_number(shown["kv_bytes_prefill_peak"]),
        over=bool(rows["over"].any()),
        samples=int(rows["measured"].notna().sum()),
    )


def _notes(cells: Sequence[MemoryCell]) -> list[str]:
    notes = []
    if any(cell.evicts and not cell.decode_bounded for cell in cells):
        notes.append(UNBOUNDED)
    if over := sum(cell.over for cell in cells):
        notes.append(f"{OVER} {over} of {len(cells)} cells.")
    if any(math.isnan(cell.nominal_bytes) for cell in cells):
        notes.append("The run does not say what an entry takes (older version): bytes are measured only.")
    return notes


def columns() -> list[tuple[str, Callable[[MemoryCell], str]]]:
    """What people see of a cell."""
    return [
        ("method", lambda c: c.method + ("" if c.decode_bounded or not c.evicts else " *")),
        ("budget", lambda c: NOTHING if c.budget is None else label(c.budget)),
        ("entries", lambda c: _entries(c.nominal_entries)),
        ("peak", lambda c: _entries(c.entries_peak)),
        ("nominal", lambda c: _size(c.nominal_bytes)),
        ("measured", lambda c: _size(c.measured_bytes)),
        ("ratio", lambda c: (NOTHING if math.isnan(c.ratio) else f"{c.ratio:.2f}") + (" !" if c.over else "")),
        ("beside", lambda c: NOTHING if math.isnan(c.beside_share) else f"{c.beside_share:.0%}"),
        ("while reading", lambda c: _size(c.reading_bytes)),
    ]


def flat(table: MemoryTable, cell: MemoryCell) -> dict[str, Any]:
    """A cell as plain data; None where there is no number."""
    share = cell.budget if isinstance(cell.budget, float) else None
    names = {"group": table.group, "task": table.task, "method": cell.method}
    data = names | {"budget": cell.budget, "budget_share": share} | asdict(cell)
    data["budget"] = None if share is not None else cell.budget
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in data.items()}


def _number(value: Any) -> float:
    """NaN for every kind of missing value."""
    return math.nan if value is None or str(value) == "<NA>" else float(value)


def _is(value: Any) -> bool:
    return value is not None and str(value) != "<NA>" and bool(value)


def _entries(value: float) -> str:
    return NOTHING if math.isnan(value) else f"{value:.0f}" if value == int(value) else f"{value:.1f}"


def _size(value: float) -> str:
    return NOTHING if math.isnan(value) else size(value)
