"""MT-Bench (Zheng et al. 2023): 80 conversations of two turns; a judge model rates each turn from 1 to 10.

Questions, GPT-4's reference answers (mathematics, reasoning, coding) and the judge's prompts are FastChat's, bundled
unchanged (Apache-2.0). ``mt_bench`` runs without thinking. ``mt_bench/thinking`` runs with thinking and longer answers;
the judge sees only the text after the thinking block.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvbench.errors import SetupError, quote
from kvbench.registry import tasks
from kvbench.scoring import judge
from kvbench.scoring.boxed import after_thinking
from kvbench.scoring.judge import prompts
from kvbench.sources.data import BUNDLED
from kvbench.task import DataSource, Doc, GenSpec, Manifest, Output, Score, Task, Turn
from kvbench.taskkit.rows import documents

REFERENCES = BUNDLED / "mt_bench" / "reference_answer_gpt-4.jsonl"
TEMPERATURES = {
    "writing": 0.7,
    "roleplay": 0.7,
    "extraction": 0.0,
    "math": 0.0,
    "coding": 0.0,
    "reasoning": 0.0,
    "stem": 0.1,
    "humanities": 0.1,
}
WITH_REFERENCE = ("math", "reasoning", "coding")  # the judge is shown a reference answer


@tasks.register("mt_bench", aliases=("mt-bench", "mtbench"))
class MTBench(Task):
    version = "2"  # an unfinished thinking block that the task forbids is the answer
    suite = "chat"
    summary = "MT-Bench, 80 two-turn conversations in 8 categories, rated by a judge (--judge)"
    variants = ("plain", "thinking")
    needs = frozenset({"judge"})
    manifest = Manifest(path="mt_bench/question.jsonl", rows=80, licence="Apache-2.0")

    def docs(self, source: DataSource, *, style: str = "default", limit: int | None = None) -> list[Doc]:
        assert self.manifest is not None
        rows = source.rows(self.name, self.manifest)[:limit]
        return documents(self, rows, self._doc, lacks="")

    def gen(self, model_type: str) -> GenSpec:
        """Return the generation settings of each turn; each document sets its own temperature (`TEMPERATURES`)."""
        thinking = self.variant == "thinking"
        return GenSpec(max_new_tokens=8192 if thinking else 1024, thinking=thinking)

    def score(self, doc: Doc, output: Output) -> Score:
        """Return the judge's ratings or, in judge mode "pair", a comparison with the answers of the full cache.

        The score has no value if no judge is set, if the judge gives no verdict, or if an answer of the model is
        missing; in mode "pair", also if an answer of the full cache is missing.

        Raises SetupError if the judge's server refuses the API key (KeyRefused), or if a local judge cannot be used.
        """
        answers = _answers(output.turns, output.thinking)
        if len(answers) < len(doc.turns):
            return Score(value=None, note=f"the model gave {len(answers)} of {len(doc.turns)} answers")
        if self.services.judge_mode != "pair":
            return judge.rate(self.services, doc, answers)
        baseline = _answers(output.baseline, output.thinking)
        if len(baseline) < len(doc.turns):
            note = "method full has no answer to compare with; run it, then 'kvbench score RUN --judge-mode pair'"
            return Score(value=None, status="unscored", note=note)
        return judge.compare(self.services, doc, answers, baseline)

    def sources(self) -> dict[str, str]:
        files = {"references_sha256": REFERENCES, "judge_prompts_sha256": prompts.FILE}
        return {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}

    def _doc(self, row: Mapping[str, Any]) -> Doc:
        name, category = str(row["question_id"]), str(row["category"])
        if category in WITH_REFERENCE and name not in _references():
            raise SetupError(
                f"data of task {quote(self.name)}: the judge needs a reference answer to question {quote(name)} of "
                f"category {quote(category)}, but kvbench has reference answers to MT-Bench's own questions only. "
                "Leave the question out, or give it another category."
            )
        return Doc(
            doc_id=name,
            turns=tuple(Turn(question=text) for text in row["turns"]),
            reference=_references()[name] if category in WITH_REFERENCE else None,
            meta={"category": category},
            gen={"temperature": TEMPERATURES[category]},
        )


def _answers(turns: Sequence[str], thinking: bool | None) -> tuple[str, ...]:
    return tuple(after_thinking(answer, thinking).strip() for answer in turns)


@functools.cache
def _references() -> dict[str, tuple[str, ...]]:
    rows = map(json.loads, REFERENCES.read_text(encoding="utf-8").splitlines())
    return {str(row["question_id"]): tuple(row["choices"][0]["turns"]) for row in rows}
