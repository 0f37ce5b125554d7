"""The report of memory: the bytes that a budget stands for (nominal bytes) beside measured bytes.

    report = MemoryReport.make(load([Path("results/demo")]))
    report.tables[0].cells[0].ratio                # measured / nominal, keys and values only
    FORMATS["markdown"](report)

Nominal bytes are the bytes of the keys and values of the nominal entries in every layer and KV head. For most methods,
the nominal entries are budget + interval, as many as a cache holds just before an eviction. For a method that does not
bound generated entries, they are the budget plus all entries after the first prompt. For the full cache, they are all
tokens of the sequence; no method has more nominal entries. No method evicts from sliding-window layers: in nominal and
in measured bytes, these layers count with the tokens in their windows.

Measured bytes are the live keys and values at the peak, from the rows. A cell is marked with ! if one of its samples
exceeds one of two bounds. The bound of measured bytes is 1.05 times the nominal bytes, plus one page per head, because
the last page may be partly empty. The bound of the entries at the peak is 1.05 times the nominal entries. Three kinds
of samples never cause this mark: samples of methods that do not bound generated entries (the full cache among them),
samples of query-agnostic runs, and samples of conversations without a row of the full cache. A separate column shows
the bytes that a method stores beside keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvbench.console.progress import size
from kvbench.eviction.budget import Budget
from kvbench.report.blocks import NAMED, NOTHING, Block, Column, Report, chosen, entries, own, percent
from kvbench.report.cells import cells_of, mean, most, present
from kvbench.report.layers import (
    Layer,
    by_window,
    evictable_note,
    evictable_share,
    later_tokens,
    layers_of,
    least,
    sequence_tokens,
    window_bytes,
)
from kvbench.report.load import Loaded
from kvbench.report.rows import Rows
from kvbench.report.tables import shared_options

PAGE = 16  # entries per page, the same number as in kvbench.engine.cache.paged, which imports torch
SLACK = 1.05
UNBOUNDED = (
    "* does not bound generated entries (evicts the prompt only, or in some heads only): nominal is the budget and all "
    "generated entries."
)
LATER = (
    "The full cache was not run on these conversations, so the length of their later questions is unknown: nominal "
    "excludes them, and none of their cells can be marked with !."
)
OVER = (
    f"! measured more than {SLACK} times the nominal bytes plus a page of {PAGE} entries per head, or more than "
    f"{SLACK} times the nominal entries:"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCell:
    """The memory of one method at one budget on one task. Unless a comment says otherwise, the figures are those of the
    one sample that `_largest` chooses. Numbers missing from the rows or the run are NaN."""

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
    allowed_bytes: float  # the most measured bytes without a mark
    beside_bytes: float  # stored beside keys and values
    beside_share: float  # of measured_bytes
    reading_bytes: float  # at the peak of reading the prompt
    evictable_share: float  # share of the sequence's memory in the full cache, see `evictable_share`
    state_bytes: float  # the part of beside_bytes that states of recurrent layers take
    kept_text: float  # share of the text's tokens that were held at the end, mean over samples; NaN without images
    kept_images: float
    over: bool  # whether any sample is over its bound; tables mark the cell with !
    samples: int  # with measured bytes

    @property
    def marked(self) -> bool:
        return self.evicts and not self.decode_bounded


def _ratio(cell: MemoryCell) -> str:
    return (NOTHING if math.isnan(cell.ratio) else f"{cell.ratio:.2f}") + (" !" if cell.over else "")


COLUMNS = [
    *NAMED,
    *own("interval", "decode_bounded", "evicts"),
    Column("nominal_entries", "nominal_entries", "entries", entries),
    *own("entries_after_evict"),
    Column("entries_peak", "entries_peak", "peak", entries),
    Column("nominal_bytes", "nominal_bytes", "nominal", size),
    Column("measured_bytes", "measured_bytes", "measured", size),
    Column("", _ratio, "ratio"),
    *own("ratio", "largest_ratio", "allowed_bytes", "beside_bytes"),
    Column("beside_share", "beside_share", "beside", percent),
    Column("reading_bytes", "reading_bytes", "while reading", size),
    *own("state_bytes", "evictable_share"),
    Column("", lambda cell: cell.evictable_share if cell.evictable_share < 1 else None, "evictable", percent),
    Column("kept_text", "kept_text", "text kept", percent),
    Column("kept_images", "kept_images", "images kept", percent),
    *own("over", "samples"),
]
SHOWN = ("method", "budget", "entries", "peak", "nominal", "measured", "ratio", "beside", "while reading")
EVICTABLE = ("evictable",)  # shown if some cell has memory that no method can evict
KEPT = ("text kept", "images kept")  # shown if prompts have images


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTable:
    group: str
    task: str
    cells: list[MemoryCell]
    notes: list[str]

    def block(self) -> Block:
        columns = [Column("group", lambda _: self.group), Column("task", lambda _: self.task), *COLUMNS]
        bounded = any(cell.evictable_share < 1 for cell in self.cells)
        images = any(not math.isnan(cell.kept_images) for cell in self.cells)
        return Block(
            title=", ".join(filter(None, (self.task, self.group))),
            lines=self.cells,
            columns=columns,
            grids=[chosen(columns, SHOWN + EVICTABLE * bounded + KEPT * images)],
            notes=self.notes,
            facts={"group": self.group, "task": self.task},
        )


@dataclass(frozen=True, slots=True)
class MemoryReport(Report):
    """A report of every cell's memory, with a table for each group of comparable rows of a task."""

    name: ClassVar[str] = "memory"
    about: ClassVar[str] = (
        "Bytes of one sequence: the sample that held most, of those over their bound (!) if there are any. Nominal: "
        "keys and values of budget + interval entries in every layer and KV head, at most those of the whole sequence. "
        "Measured: live keys and values at the peak of decoding; a head's last page may be part-filled. Beside: "
        "positions, method columns, stored queries and states, as a share of measured keys and values. While reading: "
        "everything held at the peak of reading the prompt. Text kept, images kept: the share of their tokens whose "
        "entries are held at the end."
    )
    tables: list[MemoryTable]

    @classmethod
    def make(cls, loaded: Loaded) -> MemoryReport:
        layers = layers_of(loaded)
        shared = shared_options(loaded)
        tables = []
        for group in loaded.groups:
            rows = group.rows
            later = later_tokens(rows)
            held = _with_memory(rows, later, layers)
            cells = [_cell(method, budget, part) for method, budget, part in cells_of(held, shared)]
            unknown = [LATER] if (later != later).any() else []
            notes = [*_notes(cells), *unknown, *evictable_note(held.number("evictable_share"))]
            tables.append(MemoryTable(group=group.label, task=group.task, cells=cells, notes=notes))
        return cls(loaded, tables)

    def blocks(self) -> Iterator[Block]:
        return (table.block() for table in self.tables)


def _with_memory(rows: Rows, later: Any, layers: Mapping[str, Sequence[Layer] | None]) -> Rows:
    """Return the rows with columns of their memory, named as in `MemoryCell`. later: the result of `later_tokens`.

    The measured memory is NaN for rows that failed before the cache held entries. The nominal and the allowed memory
    are NaN if the run does not describe its layers.
    """
    import numpy as np

    prompt, budget, peak = (rows.number(name) for name in ("prompt_tokens", "budget", "entries_peak"))
    known = later == later  # whether the length of the later questions is known
    sequence = sequence_tokens(rows, later)
    bounded = rows.number("decode_bounded") == 1
    limit = np.where(bounded, budget + rows.number("interval"), least(budget, prompt) + sequence - prompt)
    entries = np.where(budget == budget, least(sequence, limit), sequence)
    nominal, page = _nominal(rows, entries, later, layers)
    measured, allowed = rows.number("kv_bytes_peak") - rows.number("kv_bytes_extra"), SLACK * nominal + page
    # A query-agnostic run holds the question's entries beside the budget, and its rows do not state how many these are.
    judged = bounded & ~rows.text("compress").is_one_of("query-agnostic") & known
    over = judged & ((measured > allowed) | (peak > SLACK * entries))
    ratio = np.divide(measured, nominal, out=np.full(len(rows), math.nan), where=nominal != 0)
    return rows.having(
        nominal_entries=entries,
        nominal_bytes=nominal,
        measured_bytes=measured,
        allowed_bytes=allowed,
        ratio=ratio,
        over=over,
        evictable_share=evictable_share(rows, later, layers),
    )


def _nominal(rows: Rows, entries: Any, later: Any, layers: Mapping[str, Sequence[Layer] | None]) -> tuple[Any, Any]:
    """Return two numbers for each row: the bytes of the keys and values of `entries` entries in the row's model, and
    the bytes of one page per head; NaN if the layers of the model are unknown.

    A sliding-window layer counts with the sequence's tokens that its window holds, and without pages.
    """
    import numpy as np

    nominal, page = np.full(len(rows), math.nan), np.full(len(rows), math.nan)
    sequence = sequence_tokens(rows, later)
    for mine, rings, others in by_window(rows, later, layers):
        entry = sum(g.kv_heads * g.entry_bytes for g in others)
        nominal[mine] = entries[mine] * entry + window_bytes(rings, sequence[mine])
        page[mine] = PAGE * entry
    return nominal, page


def _cell(method: str, budget: Budget | None, rows: Rows) -> MemoryCell:
    shown = rows.where([_largest(rows)])

    def figure(name: str) -> float:
        return float(shown.number(name)[0])

    interval, beside, measured = (figure(name) for name in ("interval", "kv_bytes_extra", "measured_bytes"))
    return MemoryCell(
        method=method,
        budget=budget,
        interval=None if math.isnan(interval) else int(interval),
        decode_bounded=figure("decode_bounded") == 1,
        evicts=not math.isnan(interval),
        nominal_entries=figure("nominal_entries"),
        entries_after_evict=figure("entries_after_evict"),
        entries_peak=figure("entries_peak"),
        nominal_bytes=figure("nominal_bytes"),
        measured_bytes=measured,
        ratio=figure("ratio"),
        largest_ratio=most(rows.number("ratio")),
        allowed_bytes=figure("allowed_bytes"),
        beside_bytes=beside,
        beside_share=beside / measured if measured else math.nan,
        reading_bytes=figure("kv_bytes_prefill_peak"),
        evictable_share=figure("evictable_share"),
        state_bytes=figure("state_bytes"),
        kept_text=mean(rows.number("kept_text")),
        kept_images=mean(rows.number("kept_images")),
        over=bool(rows.number("over").any()),
        samples=len(present(rows.number("measured_bytes"))),
    )


def _largest(rows: Rows) -> int:
    """Return the position of the sample that represents the cell: the sample with the most measured bytes among the
    samples over their bound or, if no sample is over its bound, among all samples."""
    import numpy as np

    ratio, measured = (np.nan_to_num(rows.number(name), nan=-1.0) for name in ("ratio", "measured_bytes"))
    return int(np.lexsort((-ratio, -measured, rows.number("over") == 0))[0])


def _notes(cells: Sequence[MemoryCell]) -> list[str]:
    notes = []
    if any(cell.marked for cell in cells):
        notes.append(UNBOUNDED)
    if over := sum(cell.over for cell in cells):
        notes.append(f"{OVER} {over} of {len(cells)} cells.")
    if any(math.isnan(cell.nominal_bytes) for cell in cells):
        notes.append(
            "Nominal bytes are missing where the rows have no measurements, or where the run does not tell the size of "
            "an entry (an older kvbench wrote the run, or its run.json is missing)."
        )
    return notes
