"""Mathematics competitions and MATH-500: problems with one final answer. The tasks differ in data and settings.

aime24   AIME 2024, papers I and II: 30 problems, integers from 0 to 999. Text by the MAA. Some copies pad answers with
         zeros ("025"); the scorer ignores leading zeros.
aime25   AIME 2025, also 30 problems. The ids in the hub's copy are 0 to 29, in the order of the papers; kvbench's
         ids name paper and number.
amc23    AMC 12 2023, papers A and B: 40 problems, some reworded to have an integer answer. Text by the MAA. Answers
         come as floats ("27.0"). Not to be confused with the 83 problems of AI-MO/aimo-validation-amc.
math500  500 problems of the MATH test set (Hendrycks et al., MIT licence), answers in LaTeX. `category` is
         "level/subject", for example "5/Precalculus"; levels run from 1 to 5, there are seven subjects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
