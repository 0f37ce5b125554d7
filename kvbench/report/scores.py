"""The report of scores: the quality and the cost of every cell, its comparison with the baseline, and averages over
groups of tasks.

    report = ScoreReport.make(load([Path("results/demo")]), baseline="full")

The overview, if the report has one, comes first. Then each task has small tables, made for 80 columns: the quality of
the cells, their memory and their speed. If anything about the samples is special (`_sample_grids`), a table of samples
follows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from kvbench.console.progress import size
from kvbench.report.averages import AverageTable, make_averages
from kvbench.report.blocks import (
    NAMED,
    NOTHING,
    Block,
    Column,
    Report,
    chosen,
    compared,
    entries,
    estimated,
    number,
    own,
    percent,
    verdict,
)  # fmt: skip
from kvbench.report.cells import PASS_AT, SCORES, ScoreCell
from kvbench.report.load import Loaded
from kvbench.report.overview import best_block, frontier_block, overview
from kvbench.report.tables import TaskTable, make_tables

COST = ("method", "budget", "score kept", "KV peak", "of full", "after", "peak")
SPEED = ("method", "budget", "tok/s", "speed", "evicting", "load")
COUNTS = ("questions", "samples")
SAMPLES = ("truncated", "no answer", "failed", "not scored yet", *(f"pass@{k}" for k in PASS_AT if k > 1), "maj@n")


@dataclass(frozen=True, slots=True)
class ScoreReport(Report):
    """The report of scores, as the module's docstring describes it."""

    name: ClassVar[str] = "report"
    about: ClassVar[str] = (
        "Budget: KV entries per layer and KV head right after an eviction, protected entries included. Entries are "
        "measured after an eviction and at the peak, bytes at the peak of one sequence. Errors are standard errors "
        "over questions; scores that are all equal have 95% intervals instead. Differences are paired by "
        "question, with 95% intervals and Holm-adjusted p. Errors of tok/s and speed are standard deviations over "
        "batches."
    )
    tables: list[TaskTable]
    averages: list[AverageTable]
    summary: bool = False  # whether `blocks` yields the overview only

    @classmethod
    def make(cls, loaded: Loaded, baseline: str | None = None, *, summary: bool = False) -> ScoreReport:
        tables = make_tables(loaded, baseline)
        return cls(loaded, tables, make_averages(loaded.groups, tables), summary)

    def blocks(self) -> Iterator[Block]:
        if self.summary or len(self.tables) > 1 or any(table.best for table in self.tables):
            yield from overview(self.tables)
        for table in () if self.summary else self.tables:
            yield block(table)
            yield from (averages.block() for averages in self.averages if averages.last is table)

    def data(self) -> dict[str, Any]:
        return {
            "tables": [block(table).document() for table in self.tables],
            "averages": [row for averages in self.averages for row in averages.block().data()],
            "best": best_block("", self.tables).data(),
            "frontier": frontier_block("", self.tables).data(),
        }


def block(table: TaskTable) -> Block:
    """Return a task's block, with tables of quality, memory, speed and samples."""
    headline, *others = sorted(SCORES, key=lambda column: column != table.headline)
    baseline = next((cell.baseline for cell in table.cells if cell.baseline), "")
    quality = ("method", "budget", SCORES[headline], *(SCORES[o] for o in others), f"minus {baseline}", "verdict")
    columns = [*_identity(table), *_quality(headline, baseline), *_samples(), *_cost(), *_comparison()]
    evicting = f"evicting every {table.interval} tokens" if table.interval else ""
    return Block(
        title=", ".join(filter(None, (table.task, table.group, evicting))),
        lines=table.cells,
        columns=columns,
        grids=[chosen(columns, headers) for headers in (quality, COST, SPEED, *_sample_grids(table))],
        notes=table.notes,
        facts={"group": table.group, "task": table.task, "headline": table.headline},
        drops_empty=True,
    )


def _identity(table: TaskTable) -> list[Column]:
    return [
        Column("group", lambda _: table.group),
        Column("task", lambda _: table.task),
        *NAMED,
        Column("interval", lambda cell: table.interval if cell.evicts else None),
        *own("decode_bounded"),
        Column("headline", lambda _: table.headline),
    ]


def _quality(headline: str, baseline: str) -> list[Column]:
    """Return the columns of scores. The score column `headline` is shown with its error; the other score columns are
    shown as plain means."""
    return [
        Column("", _score, SCORES[headline]),
        Column("", "against.paired", f"minus {baseline}", compared),
        Column("", "against.judged", "verdict", verdict),
        *(Column(name, f"score.{name}") for name in ("mean", "se", "se_fixed", "low", "high")),
        Column("interval_rule", "score.rule"),
        *(
            Column(name, f"others.{name}", header if name != headline else "", number)
            for name, header in SCORES.items()
        ),
        *own("floor"),
        *(Column(f"pass_at_{k}", partial(_pass_at, k), f"pass@{k}" if k > 1 else "", number) for k in PASS_AT),
        Column("maj_at_n", "maj", "maj@n", number),
    ]


def _samples() -> list[Column]:
    """Return the columns on the samples behind the scores."""
    return [
        Column("questions", "score.questions", "questions"),
        Column("samples", "samples", "samples"),
        *own("failed", "unscored"),
        Column("", lambda cell: cell.failed or None, "failed"),
        Column("", lambda cell: cell.unscored or None, "not scored yet"),
        Column("truncated", "truncated", "truncated", percent),
        Column("no_answer", "no_answer", "no answer", percent),
    ]


def _cost() -> list[Column]:
    """Return the columns of cost: entries, bytes and speed of a cell, then the cell's score, bytes and speed divided by
    those of the full cache."""
    return [
        Column("entries_after_evict", "entries_after_evict", "after", entries),
        Column("entries_peak", "entries_peak", "peak", entries),
        *own("entries_mean"),
        Column("kv_bytes_peak", "kv_bytes_peak", "KV peak", size),
        *own("kv_bytes_mean"),
        *own("tokens_per_second", "tokens_per_second_sd", "roofline_share"),
        Column("", _rate, "tok/s"),
        Column("evict_share", "evict_share", "evicting", percent),
        Column("machine_load", "machine_load", "load", "{:.2f}".format),
        Column("score_of_full", "of_full.score", "score kept", percent),
        Column("bytes_of_full", "of_full.bytes", "of full", percent),
        Column("", _speed, "speed"),
        *(Column(f"{name}_of_full", f"of_full.{name}") for name in ("speed", "speed_sd")),
    ]


def _comparison() -> list[Column]:
    return [
        Column("baseline", lambda cell: cell.baseline or None),
        Column("diff", "against.paired.diff"),
        Column("diff_low", "against.paired.low"),
        Column("diff_high", "against.paired.high"),
        Column("p_holm", "against.judged.p"),
        *(Column(name, f"against.paired.{name}") for name in ("p_sign_flip", "test", "df")),
        *(Column(name, f"against.judged.{name}") for name in ("verdict", "smallest_drop")),
        Column("progress", lambda cell: cell.progress or None),
    ]


def _sample_grids(table: TaskTable) -> list[tuple[str, ...]]:
    """Return a list with one element: the headers of the table on samples. The list is empty if this table would show
    nothing special: all cells have equally many questions, and one sample per question with a complete answer and a
    score."""
    equal = len({(c.score.questions, c.samples) for c in table.cells}) == 1
    whole = not any(c.truncated > 0 or c.no_answer > 0 or c.failed or c.unscored or c.pass_at for c in table.cells)
    return [] if whole and equal else [("method", "budget", *(() if equal else COUNTS), *SAMPLES)]


def _pass_at(k: int, cell: ScoreCell) -> float | None:
    return cell.pass_at.get(k)


def _rate(cell: ScoreCell) -> str | None:
    rate, spread = cell.tokens_per_second, cell.tokens_per_second_sd
    if math.isnan(rate):
        return None
    return f"{rate:,.0f}" if math.isnan(spread) else f"{rate:,.0f} ±{spread:,.0f}"


def _speed(cell: ScoreCell) -> str | None:
    speed, spread = (cell.of_full.get(name, math.nan) for name in ("speed", "speed_sd"))
    if math.isnan(speed):
        return None
    return f"{speed:.2f}x" if math.isnan(spread) else f"{speed:.2f}x ±{spread:.2f}"


def _score(cell: ScoreCell) -> str:
    text = NOTHING if math.isnan(cell.score.mean) else estimated(cell.score)
    return f"{text} ({cell.progress})" if cell.progress else text
