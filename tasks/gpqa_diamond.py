"""GPQA diamond (Rein et al. 2023): 198 graduate-level questions with four options. CC-BY-4.0, gated, never bundled.

A document is a question with its options in one of eight random orders, and gets one sample. Over the eight documents
of a question, a model's preference for a position averages out; standard errors are over questions (clusters by
`Record ID`). All documents of one order precede those of the next: ``--limit 198`` asks each question once.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from functools import partial
from typing import Any

from kvbench.registry import tasks
from kvbench.scoring.choice import letter_last, simple_evals
from kvbench.task import DataSource, Doc, GenSpec, Manifest, Output, Score, Task, Turn
from kvbench.taskkit.rows import documents, reasoning

ORDERS = 8  # of each question's options
SEED = 0
LETTERS = "ABCD"
OPTIONS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
# From simple-evals (MIT licence); lighteval has the same.
DEFAULT = (
    "Answer the following multiple choice question. The last line of your response should be of the following format: "
    "'Answer: $LETTER' (without quotes) where LETTER is one of ABCD. Think step by step before answering.\n\n"
)
FORESIGHTKV = "Please solve the following problem step by step and put the final answer within \\boxed{}.\n"
INSTRUCTIONS = {"default": DEFAULT, "foresightkv": FORESIGHTKV}


@tasks.register("gpqa_diamond", aliases=("gpqa", "gpqa-diamond"))
class GPQADiamond(Task):
    suite = "science"
    summary = "GPQA diamond, 198 graduate-level questions under 8 orders of their options (gated data)"
    prompt_styles = tuple(INSTRUCTIONS)
    cheap_score = True
    manifest = Manifest(
        path="gpqa_diamond/gpqa_diamond.jsonl",
        rows=198,
        hub="Idavidrein/gpqa",
        config="gpqa_diamond",
        split="train",
        revision="633f5ee89ab8ad4522a9f850766b73f62147ffdd",
        samples=("gpqa_diamond/synthetic_gpqa_format.jsonl",),
        licence="CC-BY-4.0",
        gated=True,
    )

    def docs(self, source: DataSource, *, style: str = "default", limit: int | None = None) -> list[Doc]:
        assert self.manifest is not None
        rows = source.rows(self.name, self.manifest)
        orders = (documents(self, rows, partial(_doc, index, style), ids="Record ID") for index in range(ORDERS))
        return [doc for order in orders for doc in order][:limit]

    def gen(self, model_type: str) -> GenSpec:
        """Return sampling settings with one sample per document: a question's eight documents give eight samples."""
        return reasoning(model_type, max_new_tokens=32768)

    def score(self, doc: Doc, output: Output) -> Score:
        letter = letter_last(output.text, output.thinking)
        return Score(
            value=float(letter == doc.reference),
            extracted=letter,
            aux={
                "simple_evals": float(simple_evals(output.text) == doc.reference),
                "no_answer": float(letter is None),
                "right_option": float(LETTERS.index(doc.reference)),  # its position, 0 to 3
            },
        )

    def size(self) -> int | None:
        rows = super().size()
        return rows and rows * ORDERS

    def sources(self) -> dict[str, str]:
        return {"option_orders": str(ORDERS), "option_seed": str(SEED)}


def option_order(record: str, index: int) -> list[int]:
    """Return which option stands at each letter, A to D, as indices into `OPTIONS`. record: id of the question. index:
    which of the question's eight orders."""
    order = list(range(len(OPTIONS)))
    random.Random(f"gpqa-{SEED}-{record}-{index}").shuffle(order)
    return order


def _doc(index: int, style: str, row: Mapping[str, Any]) -> Doc:
    record = str(row["Record ID"])
    order = option_order(record, index)
    options = "\n".join(f"{letter}) {row[OPTIONS[i]]}" for letter, i in zip(LETTERS, order))
    return Doc(
        doc_id=f"{record}/{index}",
        turns=(Turn(question=f"{INSTRUCTIONS[style]}{row['Question']}\n\n{options}"),),
        reference=LETTERS[order.index(0)],
        meta={
            "category": str(row["High-level domain"]),
            "subdomain": str(row["Subdomain"]),
            "order": "".join(map(str, order)),
            "seed": SEED,
        },
        cluster_id=record,
    )
