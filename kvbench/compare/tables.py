"""Shows an outcome of a comparison as tables. The report's renderer prints them as text, Markdown or JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from kvbench.compare import words
from kvbench.compare.flips import documents
from kvbench.compare.measures import RATIOS, SHARES, Measure
from kvbench.compare.outcome import Judged, Outcome
from kvbench.errors import bare
from kvbench.eviction.budget import label
from kvbench.report.blocks import NOTHING, Block, Column, Report, chosen, entries, number
from kvbench.report.load import Loaded

SCORE = ("method", "budget", "base", "new", "new - base", "verdict")
COST = ("method", "budget", "after", "peak", "KV peak", "length", "truncated", "no answer", "tok/s", "eviction")


@dataclass(frozen=True, slots=True)
class Comparison(Report):
    """A report of a comparison: the verdict and the cost of each cell of BASE, "missing" if NEW lacks the cell. Notes
    name the cells that only NEW has, and the cells that --map leaves out of the comparison."""

    name: ClassVar[str] = "compare"
    about: ClassVar[str] = (
        "Differences are paired by question. The bound is one-sided at 95%; p is one-sided and Holm-adjusted. "
        "Entries are exact. Other costs are ratios NEW / BASE; truncated and no answer are changes of a share. ± is "
        "the standard deviation over batches."
    )
    outcome: Outcome
    flips: bool = False  # whether JSON lists the questions whose score changed

    @classmethod
    def make(cls, outcome: Outcome, *, flips: bool = False) -> Comparison:
        runs = [
            {"run": run, "side": side, "rows": rows}
            for side, sources in (("base", outcome.base.sources), ("new", outcome.new.sources))
            for run, rows in sources
        ]
        unfinished = dict(outcome.base.unfinished) | dict(outcome.new.unfinished)
        return cls(Loaded(groups=[], runs=runs, unfinished=unfinished), outcome, flips)

    def head(self) -> list[str]:
        return list(words.sides(self.outcome))

    def blocks(self) -> Iterator[Block]:
        for task in dict.fromkeys(one.key.task for one in self.outcome.judged):
            mine = [one for one in self.outcome.judged if one.key.task == task]
            columns = _columns(self.outcome)
            paired = [one for one in mine if one.pairs]
            yield Block(
                title=task,
                lines=mine,
                columns=columns,
                grids=[chosen(columns, SCORE), *([chosen(columns, COST)] if paired else [])],
                notes=[*words.wide(mine), *(self._notes() if mine[-1] is self.outcome.judged[-1] else ())],
                facts={"task": task},
                drops_empty=True,
            )

    def _notes(self) -> list[str]:
        """Return the notes on all tasks, which stand below the last block."""
        subject, surroundings = (
            [sentence for kind, sentence in words.differing(self.outcome) if kind == wanted]
            for wanted in ("subject", "surroundings")
        )
        notes = [words.summary(self.outcome), *words.mapped(self.outcome)]
        if failing := [why for critical, why in words.failures(self.outcome) if critical]:
            notes.append(f"Fails: {' '.join(failing)}")
        if subject:
            notes.append(f"Differs, as a regression run allows: {'; '.join(subject)}.")
        if surroundings:
            notes.append(f"Differs, and may change the last bits of logits: {'; '.join(surroundings)}.")
        if self.outcome.extra:
            notes.append(f"In NEW only: {words.few(words.new_only(self.outcome).values())}.")
        notes += words.one_stage(self.outcome)
        notes += words.decisions(self.outcome)
        return [
            *notes,
            f"Speeds were measured on {words.machines(self.outcome)}; they fail a comparison only with a limit.",
        ]

    def data(self) -> dict[str, Any]:
        outcome = self.outcome
        return {
            "base": outcome.base.name,
            "new": outcome.new.name,
            "exit_code": outcome.exit_code,
            "stages": outcome.stages,
            "summary": words.summary(outcome),
            "failures": [{"critical": critical, "why": why} for critical, why in words.failures(outcome)],
            "undecided": list(words.undecided(outcome)),
            "one_stage": list(words.one_stage(outcome)),
            "unused": list(words.unused(outcome)),
            "decisions": list(words.decisions(outcome)),
            "differs": [{"class": kind, "what": what} for kind, what in words.differing(outcome)],
            "new_only": list(words.new_only(outcome).values()),
            "new_only_cells": [
                {"cell": cell, "model": key.model, "interval": key.interval, "seed": key.seed}
                for key, cell in words.new_only(outcome).items()
            ],
            "map": list(words.mapped(outcome)),
            "tables": [block.document() for block in self.blocks()],
        } | ({"flips": list(documents(outcome))} if self.flips else {})


def _columns(outcome: Outcome) -> list[Column]:
    return [
        Column("model", "key.model"),
        Column("task", "key.task"),
        Column("method", "key.method"),
        Column("new_method", lambda one: one.pairs[0].new.key.method if one.pairs else None),
        Column("", lambda one: words.name(one, outcome).replace(bare(one.key.cell), words.method(one)), "method"),
        Column("budget", "key.budget", "budget", label),
        Column("interval", "key.interval"),
        Column("seed", "key.seed"),
        Column("tier", lambda one: "critical" if one.critical else "advisory"),
        Column("verdict", "verdict"),
        Column("", words.verdict, "verdict"),
        Column("exit_code", "code"),
        Column("margin", "margin"),
        Column("base", "tested.together.paired.mean_b", "base", number),
        Column("new", "tested.together.paired.mean_a", "new", number),
        Column("", _difference, "new - base"),
        Column("difference", "tested.together.paired.diff"),
        Column("low", "tested.together.low"),
        Column("p", "p"),
        Column("p_sign_flip", "tested.together.p_sign_flip"),
        Column("smallest_drop", "drop"),
        Column("test", "tested.together.paired.test"),
        Column("questions", "tested.together.paired.questions"),
        Column("clusters", "tested.together.paired.clusters"),
        Column("stages", lambda one: one.tested and len(one.tested.stages)),
        Column("first_difference", lambda one: one.first and one.first.words),
        Column("reasons", lambda one: list(one.reasons)),
        *_figures(),
    ]


def _figures() -> list[Column]:
    named = {
        "entries_after_evict": "after",
        "entries_peak": "peak",
        "kv_bytes_peak": "KV peak",
        "output_tokens": "length",
        "truncated": "truncated",
        "no_answer": "no answer",
        "tokens_per_second": "tok/s",
        "evict_share": "eviction",
    }
    columns = []
    for name, header in named.items():
        columns += [
            Column("", partial(_shown, name), header),
            *(Column(f"{name}.{side}", partial(_of, name, side)) for side in ("base", "new")),
        ]
        if name in ("output_tokens", *SHARES):
            columns.append(Column(f"{name}.p_more", partial(_of, name, "p")))
    return columns


def _of(name: str, side: str, one: Judged) -> float | None:
    """Return the attribute `side` ("base", "new" or "p") of a cell's measure `name`."""
    found = _measure(one, name)
    return None if found is None else float(getattr(found, side))


def _shown(name: str, one: Judged) -> str | None:
    """Return a cell's measure as a table shows it: a ratio, the change of a share, or a number of entries (the numbers
    of both sides if they differ). name: the measure."""
    found = _measure(one, name)
    if found is None or math.isnan(found.new):
        return None
    if name in SHARES:
        return f"{found.new - found.base:+.3f}"
    if name in RATIOS:
        return None if math.isnan(found.ratio) else f"{found.ratio:.2f}x{_spread(found, one)}"
    if found.base == found.new:
        return entries(found.new)
    return f"{NOTHING if math.isnan(found.base) else entries(found.base)} > {entries(found.new)}"


def _spread(found: Measure, one: Judged) -> str:
    """Return the standard deviation of the ratio of speeds (new / base), as text. It is computed from the spread of
    each side's speed over batches; with two seeds, only the batches of the first seed count. Returns "" for other
    measures than speed, and if a side has only one batch."""
    if found.name != "tokens_per_second" or not one.pairs:
        return ""
    spreads = [side.figures.get("speed_spread", math.nan) for side in (one.pairs[0].base, one.pairs[0].new)]
    return "" if any(map(math.isnan, spreads)) else f" ±{found.ratio * math.hypot(*spreads):.2f}"


def _measure(one: Judged, name: str) -> Measure | None:
    return next((found for found in one.measures if found.name == name), None)


def _difference(one: Judged) -> str:
    if one.tested is None or math.isnan(one.tested.together.diff):
        return NOTHING
    found = one.tested.together
    bound = "" if math.isnan(found.low) or one.verdict == "same" else f" (≥{found.low:+.3f})"
    return f"{found.diff:+.3f}{bound}"
