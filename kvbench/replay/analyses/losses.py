"""Finds the tokens whose loss rises most under eviction, by method.

After ForesightKV (arXiv 2602.03203, Table 8). The loss of a token of an answer is its negative log-likelihood. The rise
is the token's loss under eviction minus its loss with the full cache, or 0 if the difference is negative. The rises of
all occurrences of a vocabulary token are added up. The table has, per method and budget, the `MOST` vocabulary
tokens with the largest sums:

    count      number of occurrences
    questions  number of questions whose answers have the token; questions of one cluster count as one
    rise       mean rise in nats
    full       mean loss with the full cache
    share      the sum of the token's rises, divided by the sum of all tokens' rises under the method
    most       the largest rise; it occurs in the answer to `doc_id`, at place `position`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvbench.console import terminal
from kvbench.replay.analyses import plots
from kvbench.replay.analyses.api import Losses, MethodAnalysis, Row, Study, Table, cells, panel, register, size
from kvbench.report.plots.figure import Figure

if TYPE_CHECKING:
    from kvbench.replay.choices import Chosen

MOST, SHOWN = 50, 8


@dataclass(slots=True)
class _Sums:
    """The sums over all occurrences of one vocabulary token under one method at one budget."""

    count: int = 0
    rise: float = 0.0
    full: float = 0.0
    questions: set[str] = field(default_factory=set)
    most: tuple[float, int, int] = (-1.0, 0, 0)  # largest rise, index of the trace, place in its answer


@register("losses")
class LossRises(MethodAnalysis):
    about = "the tokens whose loss rises most under eviction, by method"
    file = "parquet"

    def __init__(self, study: Study) -> None:
        super().__init__(study)
        self._sums: dict[Chosen, dict[int, _Sums]] = {}

    def predicted(self, losses: Losses) -> None:
        sums = self._sums.setdefault(losses.chosen, {})
        rises, full = (losses.evicted - losses.full).clamp_min(0.0).tolist(), losses.full.tolist()
        for i, place in enumerate(losses.traces):
            trace = self.study.traces[place]
            for offset, (rise, loss) in enumerate(zip(rises[i], full[i])):
                position = losses.first + offset
                of = sums.setdefault(trace.answer[position], _Sums())
                of.count += 1
                of.rise += rise
                of.full += loss
                of.questions.add(trace.cluster)
                of.most = max(of.most, (rise, place, position), key=lambda most: most[0])

    def rows(self) -> list[Row]:
        """Return up to `MOST` rows of results per method and budget: a row per token, for the tokens with the largest
        sums of rises, the largest sum first."""
        return [row for chosen, sums in self._sums.items() for row in self._largest(chosen, sums)]

    def _largest(self, chosen: Chosen, sums: dict[int, _Sums]) -> list[Row]:
        total = sum(of.rise for of in sums.values())
        ordered = sorted(sums.items(), key=lambda item: -item[1].rise)
        return [
            {
                "task": self.study.task,
                **chosen.columns,
                "token": token,
                "text": self.study.text(token),
                "count": of.count,
                "questions": len(of.questions),
                "rise": of.rise / of.count,
                "full": of.full / of.count,
                "share": of.rise / total if total else None,
                "most": of.most[0],
                "doc_id": self.study.traces[of.most[1]].request.doc_id,
                "position": of.most[2],
            }
            for token, of in ordered[:MOST]
        ]

    @staticmethod
    def figures(rows: Sequence[Row]) -> list[Figure]:
        points = [
            {"panel": f"{panel(row)}, {row['method']}", "bar": _shown(row), "part": "share", "y": row["share"]}
            for row in _first(rows)
            if row["share"] is not None
        ]
        title = "Tokens whose loss rises most under eviction"
        return plots.bars("losses", title, points, x="share of all rises of the loss")

    @staticmethod
    def table(rows: Sequence[Row]) -> Table:
        head = ["task", "method", "budget", "token", "count", "rise", "full", "share"]
        return head, [
            [row["task"], row["method"], size(row), _shown(row), *cells(row, "count", "rise", "full", "share")]
            for row in _first(rows)
        ]


def _first(rows: Sequence[Row]) -> list[Row]:
    """Return the first `SHOWN` rows of each task, method and budget."""
    seen: dict[tuple[str, str, str], int] = {}
    found = []
    for row in rows:
        key = row["task"], row["method"], size(row)
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= SHOWN:
            found.append(row)
    return found


def _shown(row: Row) -> str:
    """Return a token as a table shows it: the first 24 characters of its text in quotation marks, with control
    characters escaped, and its id."""
    return f"{terminal.clean(repr(row['text']))[:24]} {row['token']}"
