"""LongBench-E (Bai et al. 2023): 13 sets of LongBench, each with short, medium and long texts.

Prompts, answer lengths and scores are those of `longbench`. The category is the text's length in words, from the data's
column `length`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from kvbench.tasks.longbench import SYNTHETIC, LongBench

from kvbench.registry import tasks
from kvbench.task import DataSource, Manifest

ROWS = {
    "qasper": 224,
    "multifieldqa_en": 150,
    "hotpotqa": 300,
    "2wikimqa": 300,
    "gov_report": 300,
    "multi_news": 294,
    "trec": 300,
    "triviaqa": 300,
    "samsum": 300,
    "passage_count": 300,
    "passage_retrieval_en": 300,
    "lcc": 300,
    "repobench-p": 300,
}


@tasks.register("longbench_e", aliases=("longbench-e",))
class LongBenchE(LongBench):
    summary = "LongBench-E, 13 sets of LongBench in three ranges of length"
    variants = tuple(ROWS)
    averages: ClassVar[Mapping[str, Mapping[str, float]]] = {"avg13": dict.fromkeys(ROWS, 1.0)}

    @property
    def manifest(self) -> Manifest:
        return dataclasses.replace(
            super().manifest,
            path=f"longbench/{self.variant}_e.jsonl",
            rows=ROWS[self.variant],
            member=f"data/{self.variant}_e.jsonl",
            samples=(SYNTHETIC,),
            where={},
        )

    def rows(self, source: DataSource) -> list[Mapping[str, Any]]:
        """Return the rows of this set. A user's data file may name the set with or without "_e", or hold other sets
        too."""
        return [row for row in super().rows(source) if str(row["dataset"]).removesuffix("_e") == self.variant]

    def category(self, row: Mapping[str, Any]) -> str:
        length = int(row["length"])
        return "0-4k" if length < 4000 else "4-8k" if length < 8000 else "8k+"
