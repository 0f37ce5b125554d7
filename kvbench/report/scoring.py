"""How the rows of a task are scored: the column of its main score, and whether samples vote for an answer.

    Scoring.of("walk", [environment]).headline       # "score_partial"

A report may be made where a task is not installed, such as the task of a plug-in. Then run.json tells how it is scored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvbench.errors import KVBenchError
from kvbench.report.cells import SCORES
from kvbench.taskkit.names import get_task


@dataclass(frozen=True, slots=True)
class Scoring:
    """How the rows of a task are scored. `headline`: the column of the task's main score. `votes`: whether samples can
    vote for an answer (`make_cell`).

    `known`: whether both values are known to hold, because the task is installed here, because a run's record states
    them, or because the task is a user's file (``file/...``), which has the defaults. If `known` is False, both values
    are the defaults.
    """

    headline: str = "score"
    votes: bool = True
    known: bool = False

    @classmethod
    def of(cls, task: str, records: Iterable[Mapping[str, Any]]) -> Scoring:
        """Return how a task is scored. records: the environments of the runs with rows of the task, as in run.json."""
        try:
            installed = get_task(task)
        except KVBenchError:
            stated = [record.get("tasks", {}).get(task, {}) for record in records]
            found = next((one for one in stated if one.get("headline") in SCORES), None)
            if found is None:
                return cls(known=task.startswith("file/"))
            return cls(found["headline"], _votes(found.get("needs", ())), known=True)
        return cls(installed.headline, _votes(installed.needs), known=True)


def _votes(needs: Iterable[str]) -> bool:
    """Return whether samples can vote: not for programs, nor for answers that a judge rates."""
    return not {"code", "judge"} & {*needs}
