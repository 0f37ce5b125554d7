"""Method x task: the score of every cell, its verdict, and the best methods at each budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbench.report.cells import ScoreCell
from kvbench.report.page.matrix import SIGNS, Matrix, best
from kvbench.report.page.scored import Cell, Scored, size
from kvbench.report.scores import block


@dataclass(frozen=True, slots=True)
class Spot:
    """A cell in the overview. `first`: no method at this budget has a higher mean."""

    cell: ScoreCell
    text: str
    verdict: str
    first: bool

    @property
    def sign(self) -> str:
        return SIGNS.get(self.verdict, "")


@dataclass(frozen=True, slots=True)
class Best:
    """The best methods of a task at a budget, and those that are not worse in the paired comparison."""

    task: str
    budget: str
    first: list[str]
    score: float
    close: list[str]


@dataclass(frozen=True, slots=True)
class Overview:
    """`lines`: (method, budget as typed, a spot per task or None), by budget."""

    tasks: list[str]
    lines: list[tuple[str, str, list[Spot | None]]]
    best: list[Best]


def read(tables: Sequence[Scored], matrices: Sequence[Sequence[Matrix]]) -> Overview:
    bests = [
        Best(scored.title, size(matrix.budget), first, _mean(scored, first[0], matrix), close)
        for scored, of in zip(tables, matrices, strict=True)
        for matrix in of
        for first, close in [best(scored, matrix)]
        if first
    ]
    firsts = {(one.task, one.budget, method) for one in bests for method in one.first}
    spots = [_spots(scored, firsts) for scored in tables]
    cells = sorted({cell: None for of in spots for cell in of}, key=lambda cell: cell[1] or 0)
    lines = [(method, size(budget), [of.get((method, budget)) for of in spots]) for method, budget in cells]
    return Overview([scored.title for scored in tables], lines, bests)


def _spots(scored: Scored, firsts: set[tuple[str, str, str]]) -> dict[Cell, Spot]:
    whole = block(scored.table)
    score = whole.grids[0][2]  # after method and budget
    return {
        (cell.method, cell.budget): Spot(
            cell,
            score.text(cell),
            cell.against.judged.verdict if cell.against else "",
            (scored.title, size(cell.budget), cell.method) in firsts,
        )
        for cell in whole.lines
    }


def _mean(scored: Scored, method: str, matrix: Matrix) -> float:
    return next(c.score.mean for c in scored.table.cells if (c.method, c.budget) == (method, matrix.budget))
