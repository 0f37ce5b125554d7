"""LongProc's tasks without web pages: the model writes out a long procedure (Ye et al. 2025, arXiv:2501.05414).

The base class is in `kvbench.taskkit.longproc`, the scorers in `kvbench.scoring.longproc`; docs/tasks.md lists levels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kvbench.errors import SetupError, quote
from kvbench.registry import tasks
from kvbench.scoring.longproc import countdown, path_traversal, tom_tracking, travel_planning, travel_search
from kvbench.task import Manifest
from kvbench.taskkit.longproc import LongProc, manifest

LEVELS = ("0.5k", "2k", "8k")


@tasks.register("longproc_path_traversal")
class PathTraversal(LongProc):
    summary = "LongProc path_traversal, routes of up to 0.5K, 2K and 8K tokens"
    variants = LEVELS
    rows: ClassVar = {"0.5k": 200, "2k": None, "8k": None}
    mark = "{city_context}"

    def texts(self, row: Mapping[str, Any]) -> dict[str, Any]:
        start, end = row["question_repr"]
        return {"city_context": row["context_nl"], "src_city": start, "dst_city": end}

    def reference(self, row: Mapping[str, Any]) -> str:
        return str(row["answer_nl"])

    def grade(self, text: str, reference: Any) -> dict[str, float]:
        return path_traversal.score_route(text, reference)


@tasks.register("longproc_tom_tracking")
class TomTracking(LongProc):
    summary = "LongProc tom_tracking, traces of beliefs of up to 0.5K, 2K and 8K tokens"
    variants = LEVELS
    rows: ClassVar = {"0.5k": 200, "2k": 200, "8k": None}
    mark = "{story}"

    def texts(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {"story": row["story"], "question": row["question"]}

    def reference(self, row: Mapping[str, Any]) -> str:
        return str(row["solution"])

    def grade(self, text: str, reference: Any) -> dict[str, float]:
        return tom_tracking.score_trace(text, reference)


@tasks.register("longproc_countdown")
class Countdown(LongProc):
    """LongProc's countdown: search for three equations that turn four numbers into a target.

    The right search procedure comes from the data's column `demonstration`.
    """

    summary = "LongProc countdown, searches for equations of up to 0.5K, 2K and 8K tokens"
    variants = LEVELS
    rows: ClassVar = dict.fromkeys(LEVELS, 200)
    mark = "[Problem]"

    def texts(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {"nums": [int(number) for number in row["nums"]], "target": row["target"]}

    def reference(self, row: Mapping[str, Any]) -> dict[str, Any]:
        search = row["demonstration"].partition("<Search Procedure>")[2].partition("</Search Procedure>")[0].strip()
        return {"numbers": [int(number) for number in row["nums"]], "target": int(row["target"]), "search": search}

    def grade(self, text: str, reference: Any) -> dict[str, float]:
        return countdown.score_countdown(text, **reference)


@tasks.register("longproc_travel_planning")
class TravelPlanning(LongProc):
    summary = "LongProc travel_planning, searches for trip plans of up to 2K and 8K tokens"
    variants = ("2k", "8k")
    mark = "YOUR TASK:"
    tokens: ClassVar = {"2k": (0, 2048), "8k": (4096, 8192)}  # estimated tokens of the right answer: at least, below

    @property
    def manifest(self) -> Manifest:  # type: ignore[override]  # all levels are in one file
        return manifest(self.part, "all", None)

    def select(self, rows: Any) -> Any:
        column, (low, high) = "estimated_output_tokens", self.tokens[self.variant]
        if not all(isinstance(row.get(column), (int, float)) for row in rows):
            raise SetupError(
                f"data of task {quote(self.name)} have rows without a number in {quote(column)}. Correct these rows."
            )
        return [row for row in rows if low <= row[column] < high]

    def texts(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {"problem": row["disambig_question_text"]}

    def reference(self, row: Mapping[str, Any]) -> dict[str, Any]:
        cities, days = (row[f"ground_truth_{name}"].split("**") for name in ("cities", "durations"))
        stays = list(zip(filter(None, cities), map(int, filter(None, days)), strict=True))
        return {"stays": stays, "procedure": travel_search.solution(row)}

    def grade(self, text: str, reference: Any) -> dict[str, float]:
        return travel_planning.score_plan(text, **reference)
