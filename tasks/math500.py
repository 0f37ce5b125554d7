"""MATH-500: 500 problems of the MATH test set (Hendrycks et al., MIT licence), answers in LaTeX.

`category` is "level/subject", for example "5/Precalculus"; levels run from 1 to 5, there are seven subjects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.registry import tasks
from kvbench.task import Manifest
from kvbench.taskkit.math_task import MathTask


@tasks.register("math500")
class Math500(MathTask):
    summary = "MATH-500, 500 problems of 5 levels and 7 subjects, LaTeX answers"
    samples = 4
    max_new_tokens = 16384
    manifest = Manifest(
        path="math500/math500.jsonl",
        rows=500,
        hub="HuggingFaceH4/MATH-500",
        split="test",
        revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
        rename={"unique_id": "id"},
        ids_sha256="ea5794716f49ab520e2ce8c87e69217848624b40273a6974b7d98f4294950cfe",
    )

    def meta(self, row: Mapping[str, Any]) -> dict[str, Any]:
        level, subject = str(row["level"]), str(row["subject"])
        return {"category": f"{level}/{subject}", "level": level, "subject": subject}
