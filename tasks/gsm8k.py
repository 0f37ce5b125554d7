"""GSM8K test set: 1,319 word problems for grade school (OpenAI, MIT licence).

The reference is the number after ``####`` in the data's solution. The additional scores `lm_eval_strict` and
`lm_eval_flexible` come from lm-eval's two answer filters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvbench.registry import tasks
from kvbench.scoring.gsm8k import lm_eval_filters
from kvbench.task import Doc, Manifest, Output, Score
from kvbench.taskkit.math_task import MathTask, stopped


@tasks.register("gsm8k")
class Gsm8k(MathTask):
    summary = "GSM8K test, 1,319 word problems, numeric answers"
    samples = 1
    max_new_tokens = 8192
    column = "question"
    manifest = Manifest(
        path="gsm8k/gsm8k_test.jsonl",
        rows=1319,
        hub="openai/gsm8k",
        config="main",
        split="test",
        revision="740312add88f781978c0658806c59bc2815b9866",
        hub_id=lambda index, row: f"gsm8k-{index}",
        ids_sha256="299c174205eeb05f3febf010f8cfcc39e398e625aff833f583d11c43e9867fa2",
    )

    def reference(self, row: Mapping[str, Any]) -> str:
        return str(row["answer"]).rpartition("####")[2].strip().replace(",", "")

    def score(self, doc: Doc, output: Output) -> Score:
        score = super().score(doc, output)
        return replace(score, aux={**score.aux, **lm_eval_filters(stopped(doc, output.text), doc.reference)})
