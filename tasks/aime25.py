"""AIME 2025, papers I and II: 30 competition problems with integer answers from 0 to 999. Text: MAA.

The hub copy numbers the problems 0 to 29 in the order of the papers; ids here name paper and number.
"""

from __future__ import annotations

from kvbench.registry import tasks
from kvbench.task import Manifest
from kvbench.taskkit.math_task import MathTask


@tasks.register("aime25")
class Aime25(MathTask):
    summary = "AIME 2025 I and II, 30 problems, integer answers"
    integer = True
    manifest = Manifest(
        path="aime25/aime25.jsonl",
        rows=30,
        hub="math-ai/aime25",
        split="test",
        revision="563bb8404243c5f09de6ec262f2db674fe5bce9b",
        hub_id=lambda index, row: f"aime25-{'I' if index < 15 else 'II'}-{index % 15 + 1}",
        ids_sha256="3373141496cdc03759c6e1083adcfc36570b2c52255d67969b1d23de17877a38",
    )
