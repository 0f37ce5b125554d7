"""LongBench v2 (Bai et al. 2024, arXiv:2412.15204): 503 questions with four options on texts of 8K to 2M words.

Official prompts, bundled (MIT). The second turn of the variant `cot` continues the conversation, so the model answers
from the evicted cache. The official script starts a new prompt without the text, which would not test the cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvbench.errors import quote
from kvbench.registry import tasks
from kvbench.scoring.choice import letter_last, longbench_v2
from kvbench.task import DataSource, Doc, GenSpec, Manifest, Output, Score, Task, Turn
from kvbench.taskkit.context_template import bundled, parts, text_id
from kvbench.taskkit.rows import answer, documents

OFFICIAL_LIMIT = 120_000  # tokens of a prompt
SHORT, SHORT_ROWS = "short", 180  # up to 32,000 words
RESERVE = 500  # tokens kept free for the chat template, beside prompt and answer
FIELDS = {
    "$Q$": "question",
    "$C_A$": "choice_A",
    "$C_B$": "choice_B",
    "$C_C$": "choice_C",
    "$C_D$": "choice_D",
}  # replaced in this order, after the long text was put in: as officially, a "$Q$" in that text is replaced too


@tasks.register("longbench_v2", aliases=("longbench-v2",))
class LongBenchV2(Task):
    version = "2"  # an unfinished thinking block that the task forbids is the answer
    suite = "long context"
    summary = (
        "LongBench v2, 503 questions with four options on texts of 8K to 2M words; 180 for models with shorter contexts"
    )
    variants = ("0shot", "cot")
    cheap_score = True
    manifest = Manifest(
        path="longbench_v2/data.json",
        rows=503,
        hub="THUDM/LongBench-v2",
        files=("data.json",),
        revision="2b48e494f2c7a2f0af81aae178e05c7e1dde0fe9",
        samples=("longbench_v2/synthetic_format.jsonl",),
        licence="Apache-2.0",
    )

    def __init__(self, variant: str = "", length: int = 0) -> None:
        super().__init__(variant, length)
        self.short_kept: int | None = None  # number of short questions; None if all lengths are asked

    def docs(self, source: DataSource, *, style: str = "default", limit: int | None = None) -> list[Doc]:
        assert self.manifest is not None
        manifest = self.manifest
        if short := self.reader is not None and self.reader.context < OFFICIAL_LIMIT:
            manifest = dataclasses.replace(manifest, rows=SHORT_ROWS, where={"length": SHORT})
        rows = source.rows(self.name, manifest)
        self.short_kept = len(rows) if short else None
        return documents(self, rows[:limit], self._doc, ids="_id")

    def gen(self, model_type: str) -> GenSpec:
        """Return sampling settings for greedy decoding; the official script samples at temperature 0.1."""
        new = 1024 if self.variant == "cot" else 128
        later = new if self.variant == "cot" else 0  # tokens of the second answer
        return GenSpec(
            max_new_tokens=new, truncate="middle", reserve=RESERVE + later, longest=OFFICIAL_LIMIT, thinking=False
        )

    def score(self, doc: Doc, output: Output) -> Score:
        """Score an answer; an answer without a letter counts as wrong (officially `compensated = False`)."""
        text = answer(output)
        letter = longbench_v2(text)
        aux = {"no_answer": float(letter is None), "letter_last": float(letter_last(text) == doc.reference)}
        return Score(value=float(letter == doc.reference), extracted=letter, aux=aux)

    def notes(self) -> list[str]:
        if self.short_kept is None:
            return []
        return [
            f"task {quote(self.name)} asks only its {self.short_kept} questions of length {SHORT}; "
            f"all {self.size()} need a model with a context of {OFFICIAL_LIMIT:,} tokens."
        ]

    def _doc(self, row: Mapping[str, Any]) -> Doc:
        turns = [_first("0shot_cot.txt" if self.variant == "cot" else "0shot.txt", row)]
        if self.variant == "cot":
            turns.append(Turn(question=bundled("longbench_v2/0shot_cot_ans.txt").partition("$COT$")[2].lstrip("\n")))
        return Doc(
            doc_id=str(row["_id"]),
            turns=tuple(turns),
            reference=str(row["answer"]),
            meta={"category": f"{row['difficulty']}/{row['length']}", "domain": row["domain"]},
            cluster_id=text_id(row["context"]),
        )


def _first(file: str, row: Mapping[str, Any]) -> Turn:
    """Return the first user message for a question of the data set. file: name of the bundled prompt."""
    context, question = parts(bundled(f"longbench_v2/{file}"), "$DOC$")
    context = context.replace("$DOC$", str(row["context"]).strip())
    for mark, column in FIELDS.items():
        text = str(row[column]).strip()
        context, question = context.replace(mark, text), question.replace(mark, text)
    return Turn(context=context, question=question)
