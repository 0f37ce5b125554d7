"""Mathematics competitions of 2025 and 2026 as MathArena publishes them (matharena.ai, CC BY-NC-SA 4.0; not bundled).

Columns: `problem_idx` (integer), `problem`, `answer` (aime26: a number; else LaTeX); `problem_type` (list of texts,
which gives the category) for HMMT and BRUMO; `source` for Apex. Columns, split and row counts come from the data sets'
pages on the hub and MathArena's configuration files. The pinned commits are those of other public evaluation code; they
were not compared with the hub. Prompts and scores are those of kvbench's other mathematics tasks, not MathArena's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.registry import tasks
from kvbench.task import Manifest
from kvbench.taskkit.math_task import MathTask
from kvbench.taskkit.rows import texts_of


def _manifest(name: str, hub: str, rows: int, revision: str) -> Manifest:
    return Manifest(
        path=f"{name}/{name}.jsonl",
        rows=rows,
        hub=f"MathArena/{hub}",
        split="train",
        revision=revision,
        hub_id=lambda index, row: f"{name}-{row['problem_idx']}",
        licence="CC-BY-NC-SA-4.0",
    )


class _Typed(MathTask):
    """A competition whose data names one or several types for each problem. The types become the problem's category,
    such as "Geometry" or "Algebra + Number Theory"."""

    def meta(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {"category": " + ".join(texts_of(row, "problem_type"))}


@tasks.register("aime26")
class Aime26(MathTask):
    summary = "AIME 2026 I and II, 30 problems, integer answers"
    integer = True
    manifest = _manifest("aime26", "aime_2026", 30, "d2de22f3c656b4f56cf8981212186377d1e23bc3")


@tasks.register("hmmt_feb25")
class HmmtFebruary25(_Typed):
    summary = "HMMT February 2025, 30 problems, LaTeX answers"
    manifest = _manifest("hmmt_feb25", "hmmt_feb_2025", 30, "6fdc4277120810ff75aa22d2d5489b91f7a262a1")


@tasks.register("hmmt_nov25")
class HmmtNovember25(_Typed):
    summary = "HMMT November 2025, 30 problems, LaTeX answers"
    manifest = _manifest("hmmt_nov25", "hmmt_nov_2025", 30, "118dbfb45c4c9467c672268ed55166642897aa46")


@tasks.register("hmmt_feb26")
class HmmtFebruary26(_Typed):
    summary = "HMMT February 2026, 33 problems, LaTeX answers"
    manifest = _manifest("hmmt_feb26", "hmmt_feb_2026", 33, "02fba4f74d8e68e73e66a02d540fd979c05c274c")


@tasks.register("brumo25")
class Brumo25(_Typed):
    summary = "Brown University Math Olympiad 2025, 30 problems, LaTeX answers"
    manifest = _manifest("brumo25", "brumo_2025", 30, "6de9bc0987f5710c6376ee980e1483dbeb55cfda")


@tasks.register("apex25")
class Apex25(MathTask):
    summary = "MathArena Apex 2025, 12 problems that models rarely solve, LaTeX answers"
    manifest = _manifest("apex25", "apex_2025", 12, "ac8a641db12cc87be39e61ea89f2e04c80c5f2e7")

    def meta(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {"category": str(row["source"])}
