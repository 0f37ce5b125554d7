"""MathVista testmini (Lu et al. 2024, arXiv:2310.02255): 1,000 questions on a picture, with options or a number.

    mathvista         kvbench's own rule extracts the answer (`kvbench.scoring.mathvista.by_rule`); no judge
    mathvista/judge   the official pipeline: a judge extracts the answer from every text that is not an answer already

CC BY-SA 4.0, never bundled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from kvbench.errors import SetupError, quote
from kvbench.registry import tasks
from kvbench.scoring import mathvista
from kvbench.scoring.boxed import after_thinking
from kvbench.scoring.judge import extraction
from kvbench.scoring.judge.asking import judged_by
from kvbench.scoring.mathvista import Wanted
from kvbench.task import IMAGE, DataSource, Doc, GenSpec, Image, Manifest, Output, Score, Task, Turn
from kvbench.taskkit.rows import documents

# Hints are data of the benchmark: they are part of its column `query`.
HINTS = {
    "text": "answer the question and provide the correct option letter, e.g., A, B, C, D, at the end.",
    "integer": "answer the question requiring an integer answer and provide the final value, e.g., 1, 2, 3, at the "
    "end.",
    "float 1": "answer the question requiring a floating-point number with one decimal place and provide the final "
    "value, e.g., 1.2, 1.3, 1.4, at the end.",
    "float 2": "answer the question requiring a floating-point number with two decimal places and provide the final "
    "value, e.g., 1.23, 1.34, 1.45, at the end.",
    "list": "answer the question requiring a Python list as an answer and provide the final list, e.g., [1, 2, 3], "
    "[1.2, 1.3, 1.4], at the end.",
}


@tasks.register("mathvista")
class MathVista(Task):
    version = "4"  # an option that is part of the formula in the box does not count; "So A is right angled" names none
    suite = "vision"
    summary = (
        "MathVista testmini, 1,000 questions on pictures, mathematics and charts (needs a model that reads images)"
    )
    variants = ("rule", "judge")
    prompt_styles = ("default", "released")
    manifest = Manifest(
        path="mathvista/testmini.jsonl",
        rows=1000,
        hub="AI4Math/MathVista",
        split="testmini",
        revision="2b6ad69445fbb5695c9b165475e8decdbeb97747",
        rename={"pid": "id"},
        ids_sha256="9ba1f34e31e1f47ece93b2486be801dcbf0c3ba443c435429a94e854bf54e7aa",
        images="image",
        pixels="decoded_image",
        licence="CC-BY-SA-4.0",
    )

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]  # of the variant
        return frozenset({"judge"}) if self.variant == "judge" else frozenset()

    def docs(self, source: DataSource, *, style: str = "default", limit: int | None = None) -> list[Doc]:
        assert self.manifest is not None
        rows = source.rows(self.name, self.manifest)[:limit]
        return documents(self, rows, partial(_doc, style), ids="id")

    def gen(self, model_type: str) -> GenSpec:
        return GenSpec(max_new_tokens=1024, thinking=False)

    def score(self, doc: Doc, output: Output) -> Score:
        """Score an answer.

        The variant without a judge also has a strict score. It is 1 for a right answer if the text is the bare answer
        or contains ``The answer is "..."``; otherwise it is 0.

        In the variant with a judge, the score has no value if the answer must be extracted and no judge is set, or if
        the judge gives no usable reply. This variant raises SetupError if the judge's server refuses the API key
        (KeyRefused), or if a local judge cannot be used.
        """
        wanted, text = doc.reference, after_thinking(output.text, output.thinking).strip()
        if self.variant == "judge":
            return self._judged(doc, text)
        quick = mathvista.direct(text, wanted, quoted=True)
        found = mathvista.by_rule(text, wanted) if quick is None else quick
        return Score(
            value=float(mathvista.is_right(found, wanted)),
            strict=float(mathvista.is_right(quick, wanted)),
            extracted=found,
            aux={"no_answer": float(found is None)},
        )

    def sources(self) -> dict[str, str]:
        if self.variant != "judge":
            return {}
        return {"judge_prompt_sha256": hashlib.sha256(extraction.FILE.read_bytes()).hexdigest()}

    def _judged(self, doc: Doc, text: str) -> Score:
        wanted: Wanted = doc.reference
        found, facts = mathvista.direct(text, wanted), judged_by("nobody", "extraction")
        if found is None and text:
            asked = extraction.extract(self.services, doc.turns[0].question, text)
            if isinstance(asked, Score):
                return asked
            found, facts = asked.value, judged_by(asked.judge, "extraction")
        return Score(
            value=float(mathvista.is_right(found or "", wanted)),
            extracted=found,
            aux={"no_answer": float(not found)},
            facts=facts,
        )


def _doc(style: str, row: Mapping[str, Any]) -> Doc:
    name = str(row["id"])
    wanted = _wanted(row, name)
    if not isinstance(row["image"], Image):
        raise SetupError(f"data of task 'mathvista': question {quote(name)} must have one image. Correct the row.")
    question = _text(row, "question", name) + (f" (Unit: {row['unit']})" if row["unit"] else "")
    options = [f"({chr(ord('A') + i)}) {choice}" for i, choice in enumerate(wanted.choices)]
    asked = "\n".join([f"Question: {question}", *(["Choices:", *options] if options else [])])
    precision = f" {wanted.precision}" if wanted.kind == "float" else ""
    hint = f"Hint: Please {HINTS[wanted.kind + precision]}"
    return Doc(
        doc_id=name,
        turns=(
            Turn(
                context=IMAGE,
                question=f"{hint}\n{asked}".strip() if style == "default" else f"{asked}\n{hint}\nSolution:",
                images=(row["image"],),
            ),
        ),
        reference=wanted,
        meta={"category": str(row["metadata"]["task"])},
    )


def _wanted(row: Mapping[str, Any], name: str) -> Wanted:
    """Return the right answer to a question (`row`). Raises SetupError if the row states no answer, or if its columns
    name an unknown form of answer or contradict each other (such as options for a number)."""
    choices = tuple(map(str, row["choices"] or ()))
    precision = None if row["precision"] is None else int(row["precision"])
    wanted = Wanted(_text(row, "answer", name), str(row["answer_type"]), precision, choices)
    known = wanted.kind in mathvista.KINDS and (wanted.kind != "float" or precision in (1, 2))
    options = {bool(choices), wanted.kind == "text", row["question_type"] == "multi_choice"}
    if not known or len(options) > 1:
        raise SetupError(
            f"data of task 'mathvista': question {quote(name)} names an unknown form of answer, or contradicts itself. "
            "Correct its 'question_type', 'answer_type', 'precision' or 'choices'."
        )
    return wanted


def _text(row: Mapping[str, Any], column: str, name: str) -> str:
    """Return the text in a column of a question (`row`). Raises SetupError if there is none."""
    if not isinstance(row[column], str) or not row[column].strip():
        raise SetupError(
            f"data of task 'mathvista': question {quote(name)} has no text in {quote(column)}. Correct the row."
        )
    return str(row[column])
