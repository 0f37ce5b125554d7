"""AMC 12 2023, papers A and B: 40 problems, some reworded to have an integer answer. Text: MAA.

Not to be confused with the 83 problems of AI-MO/aimo-validation-amc. Answers come as floats ("27.0").
"""

from __future__ import annotations

from kvbench.registry import tasks
from kvbench.task import Manifest
from kvbench.taskkit.math_task import MathTask


@tasks.register("amc23")
class Amc23(MathTask):
    summary = "AMC 12 2023 A and B, 40 problems, integer answers"
    max_new_tokens = 16384
    integer = True
    manifest = Manifest(
        path="amc23/amc23.jsonl",
        rows=40,
        hub="math-ai/amc23",
        split="test",
        revision="80815d37005feb82cd7f8fbc6901d5d3eff43057",
        rename={"question": "problem"},
        hub_id=lambda index, row: f"amc23-{row['id']}",
        ids_sha256="0fa1a3002d6ab672c05aa521d1691fcb08b1fdc20d6369fa3acd93a73ee99f94",
    )
