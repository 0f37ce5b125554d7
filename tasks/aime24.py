"""AIME 2024, papers I and II: 30 competition problems with integer answers from 0 to 999.

Text: MAA. Some copies pad answers with zeros ("025"); the scorer does not care.
"""

from __future__ import annotations

from kvbench.registry import tasks
from kvbench.task import Manifest
from kvbench.taskkit.math_task import MathTask


@tasks.register("aime24")
class Aime24(MathTask):
    summary = "AIME 2024 I and II, 30 problems, integer answers"
    integer = True
    manifest = Manifest(
        path="aime24/aime24.jsonl",
        rows=30,
        hub="HuggingFaceH4/aime_2024",
        split="train",
        revision="2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
        hub_id=lambda index, row: f"aime24-{row['id']}",
        ids_sha256="e78fef12062e7fa4d506ad07ca3e2eab741a1a3be9c092ed7b97ea819374f662",
    )
