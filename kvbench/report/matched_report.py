"""The report of ``--matched``: for each method, the three differences of mean scores that `kvbench.report.matched`
defines. Figures show what scoring adds and what protection adds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from kvbench.report.blocks import NAMED, Block, Column, Report, chosen, compared, estimated, verdict
from kvbench.report.cells import UNBOUNDED, at_budget, idle_note
from kvbench.report.load import Loaded
from kvbench.report.matched import Matched, MatchedTable, matched_tables
from kvbench.report.plots.bars import bars
from kvbench.report.plots.captions import counted, listed
from kvbench.report.plots.figure import Figure, Point
from kvbench.report.stats import Paired

EFFECTS = ("protection_adds", "scoring_adds", "own_scoring")
TITLE = "What scoring and protection add"
CAPTION = (
    "Bars: differences of mean scores over shared questions; rules: their 95% intervals. scoring: the method less "
    "random under the same protection; protection: the method under this protection less the method under its own."
)


COLUMNS = [
    *NAMED,
    Column("own", "own.mean"),
    Column("own_se", "own.se"),
    Column("", "own", "own", estimated),
    Column("matched", "matched.mean"),
    Column("matched_se", "matched.se"),
    Column("", "matched", "matched", estimated),
    *(
        Column(f"{name}{end}", f"{name}.{value}")
        for name in EFFECTS
        for end, value in (("", "diff"), ("_low", "low"), ("_high", "high"), ("_questions", "questions"))
    ),
    *(Column("", name, name.replace("_", " "), compared) for name in EFFECTS),
    Column("p_holm", "judged.p"),
    Column("verdict", "judged.verdict"),
    Column("", "judged", "scoring", verdict),
]
SHOWN = ("method", "budget", "own", "matched", "protection adds", "own scoring", "scoring adds", "scoring")


@dataclass(frozen=True, slots=True)
class MatchedReport(Report):
    """A report on each method under a protection other than its own."""

    name: ClassVar[str] = "matched"
    about: ClassVar[str] = (
        "own: score under the method's own protection; matched: under the protection in the title. protection adds: "
        "matched less own. own scoring: the method less random, each under its own protection, as usual tables show "
        "it; it mixes both effects. scoring adds: the method less random under the same protection, which is the "
        "effect of the scores alone. Differences are paired over shared questions, with 95% intervals; the verdicts on "
        "'scoring adds' are Holm-adjusted within a table."
    )
    tables: list[MatchedTable]

    @classmethod
    def make(cls, loaded: Loaded) -> MatchedReport:
        return cls(loaded, matched_tables(loaded))

    def head(self) -> list[str]:
        if self.tables:
            return []
        return [
            "No rows were made under another protection than the methods' own. 'kvbench run --protect own --protect "
            "prompt+recent=64' makes rows of both kinds; 'kvbench run --suite protection' is an example."
        ]

    def blocks(self) -> Iterator[Block]:
        return (_block(table) for table in self.tables)

    def figures(self) -> list[Figure]:
        """Return one figure for each table that has differences: what scoring adds and what the protection adds, as
        bars."""
        return [
            Figure(f"matched-{number}", title, _caption(table), bars(title, points, x="difference of the score"))
            for number, table in enumerate(self.tables, 1)
            if (points := list(_points(table)))
            for title in [f"{TITLE}: {', '.join(filter(None, (table.task, table.group, table.protection)))}"]
        ]


def _block(table: MatchedTable) -> Block:
    where = f"evicting every {table.interval} tokens" if table.interval else ""
    notes = []
    if not any(line.scoring_adds for line in table.lines):
        notes.append("The method 'random' did not run under this protection, so what scoring adds is not known.")
    notes += idle_note(at_budget(line.method, line.budget) for line in table.lines if line.idle and line.budget)
    notes += [UNBOUNDED] if any(line.marked for line in table.lines) else []
    return Block(
        title=", ".join(filter(None, (table.task, table.group, where, f"protection {table.protection}"))),
        lines=table.lines,
        grids=[chosen(COLUMNS, SHOWN)],
        columns=[
            Column("group", lambda _: table.group),
            Column("task", lambda _: table.task),
            Column("protection", lambda _: table.protection),
            Column("interval", lambda _: table.interval),
            *COLUMNS,
        ],
        notes=notes,
        facts={"group": table.group, "task": table.task, "protection": table.protection},
    )


def _drawn(table: MatchedTable) -> Iterator[tuple[str, Matched, Paired]]:
    """Yield (effect, line, difference) for each difference that the table's figure shows."""
    for effect in ("scoring_adds", "protection_adds"):
        for line in table.lines:
            paired: Paired | None = getattr(line, effect)
            if paired is not None:
                yield effect.partition("_")[0], line, paired


def _points(table: MatchedTable) -> Iterator[Point]:
    for effect, line, paired in _drawn(table):
        ends = {} if paired.low != paired.low else {"low": paired.low, "high": paired.high}
        panel = f"{effect}, budget {line.budget}"
        yield {"panel": panel, "bar": line.method, "part": effect, "length": paired.diff, **ends}


def _caption(table: MatchedTable) -> str:
    questions = counted([paired.questions for _, _, paired in _drawn(table)])
    return f"{CAPTION} A difference is over {questions}; model {listed(table.models)}."
