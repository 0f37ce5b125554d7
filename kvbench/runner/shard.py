"""A shard: the part of a run's rows that one process generates when several processes share a run (``--shard 2/4``).

docs/clusters.md states which rows a shard has. Slots and lengths are planned for the whole cell. On devices of one
kind, a row is therefore the same in a shard as in a run without shards.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvbench.config.parsers import BadValue, got, parse
from kvbench.errors import UserError, quote

if TYPE_CHECKING:
    from kvbench.runner.cell import CellPlan
    from kvbench.runner.run_plan import RunPlan

_FORM = re.compile(r"([1-9][0-9]{0,5})/([1-9][0-9]{0,5})", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """One of `of` shards of a run; `number` counts from 1."""

    of: int
    number: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    @property
    def suffix(self) -> str:
        """The end of the name of a shard's folder: ``-2-of-4``."""
        return f"-{self.number}-of-{self.of}"

    def divide(self, plan: RunPlan) -> RunPlan:
        """Return the run's plan, reduced to the rows of this shard. On CPUs the shard has one worker by default,
        because other shards may run on the same machine."""
        cells = tuple(self._part(number, cell) for number, cell in enumerate(plan.cells))
        return replace(plan, cells=cells, allowed=plan.threads)

    def _part(self, number: int, cell: CellPlan) -> CellPlan:
        """Return a cell reduced to its rows in this shard. With n shards, question d of cell c (both counted from 0) is
        in shard 1 + (c + d) mod n: c spreads the questions evenly even if each cell has only a few."""
        questions = dict.fromkeys(row.prompt.doc_id for row in cell.rows)
        mine = {doc for question, doc in enumerate(questions) if (number + question) % self.of == self.number - 1}
        return replace(cell, rows=[row for row in cell.rows if row.prompt.doc_id in mine])

    def record(self, rows: int) -> dict[str, Any]:
        """Return the part of a run's record about the shard. rows: the number of rows of all shards together."""
        return {"shard": str(self), "rows_of_all_shards": rows}


def parse_shard(raw: object) -> Shard:
    """Parse I/N, such as 2/4, with I from 1 to N. Raises BadValue."""
    form = _FORM.fullmatch(str(raw))
    if form is None or int(form[1]) > int(form[2]):
        raise BadValue("I/N with I from 1 to N, as in 2/4", got(raw))
    return Shard(int(form[2]), int(form[1]))


def recorded(run: str, record: Mapping[str, Any]) -> Shard | None:
    """Return the shard that a run's record (`environment` in run.json) names; None for a run that is no shard. Raises
    UserError if the record names an impossible shard."""
    text = record.get("shard")
    return None if text is None else parse(f"the shard in the record of run {quote(run)}", parse_shard, text)


def agreed(run: str, before: Mapping[str, Any], asked: Shard | None, *, resume: bool) -> Shard | None:
    """Return the shard that a new or continued run generates; None for a run with all rows.

    before: the record of the run to continue; empty for a new run. asked: the shard that the user named, or None. With
    `resume`, the user need not name the shard: if `asked` is None, the function returns the shard of the existing run.
    In all other cases, the function raises UserError if `asked` differs from the shard of the existing run.
    """
    if not before:
        return asked
    was = recorded(run, before)
    if was == asked or (resume and asked is None):
        return was
    has = f"run {quote(run)} {'has the rows of all shards' if was is None else f'is shard {was}'}"
    wants = "without --shard a run has all rows" if asked is None else f"you asked for --shard {asked}"
    raise UserError(
        f"{has}; {wants}. {'Leave out --shard' if was is None else f'Give --shard {was}'}, or give another --run-name."
    )
