"""MMDU (Liu et al. 2024, arXiv:2406.11833): 110 dialogues of many turns about 2 to 20 pictures, rated by a judge.

Pictures stand where the data mark them. The judge sees the pictures and a reference answer; its prompt is the released
one, bundled unchanged. The data are CC BY-NC 4.0, never bundled.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from typing import Any

from kvbench.errors import SetupError, quote
from kvbench.registry import tasks
from kvbench.scoring.boxed import after_thinking
from kvbench.scoring.judge import dialogue
from kvbench.task import IMAGE, DataSource, Doc, GenSpec, Manifest, Output, Score, Task, Turn
from kvbench.taskkit.rows import documents


@tasks.register("mmdu")
class MMDU(Task):
    version = "2"  # an unfinished thinking block that the task forbids is the answer
    suite = "vision"
    summary = "MMDU, 110 dialogues about several pictures, rated by a judge that reads images (--judge)"
    needs = frozenset({"judge", "images"})
    manifest = Manifest(
        path="mmdu/benchmark.json",
        rows=110,
        hub="laolao77/MMDU",
        files=("benchmark.json",),
        images="image",
        archive="mmdu_pics.zip",
        licence="CC-BY-NC-4.0",
    )

    def docs(self, source: DataSource, *, style: str = "default", limit: int | None = None) -> list[Doc]:
        assert self.manifest is not None
        rows = source.rows(self.name, self.manifest)[:limit]
        return documents(self, rows, _doc, ids="id", lacks="")

    def gen(self, model_type: str) -> GenSpec:
        """Return settings for greedy decoding of up to 2048 tokens per turn, as in the released scripts for open
        models."""
        return GenSpec(max_new_tokens=2048, thinking=False)

    def score(self, doc: Doc, output: Output) -> Score:
        """Return the judge's scores of the dialogue, as `rate_dialogue` makes them.

        The score has no value in judge mode "pair", without a judge, or if an answer of the dialogue is missing.

        Raises SetupError if the judge's server refuses the API key (KeyRefused), or if a local judge is given.
        """
        if self.services.judge_mode == "pair":
            return Score(value=None, status="unscored", note="mmdu compares no pairs; use --judge-mode single")
        answers = [after_thinking(answer, output.thinking).strip() for answer in output.turns]
        if len(answers) < len(doc.turns):
            return Score(value=None, note=f"the model gave {len(answers)} of {len(doc.turns)} answers")
        return dialogue.rate_dialogue(self.services, doc, answers)

    def sources(self) -> dict[str, str]:
        return {"judge_prompt_sha256": hashlib.sha256(dialogue.FILE.read_bytes()).hexdigest()}


def _doc(row: Mapping[str, Any]) -> Doc:
    name, images = str(row["id"]), iter(row["image"])
    said = [(str(part["from"]), part["value"]) for part in row["conversations"]]
    speakers = [speaker for speaker, _ in said]
    if not said or speakers != ["user", "assistant"] * (len(said) // 2):
        raise _wrong(name, "does not alternate questions and answers")
    if not all(isinstance(text, str) and text.strip() for _, text in said):
        raise _wrong(name, "has a turn without text")
    questions, answers = [text for _, text in said[::2]], tuple(text for _, text in said[1::2])
    marks = [question.count(dialogue.MARK) for question in questions]
    if sum(marks) > len(row["image"]):  # images without a mark are never shown, as in the released scripts
        raise _wrong(name, f"marks {sum(marks)} images in its text but names {len(row['image'])} image files")
    turns = tuple(
        Turn(question=question.replace(dialogue.MARK, IMAGE), images=tuple(itertools.islice(images, count)))
        for question, count in zip(questions, marks)
    )
    return Doc(doc_id=name, turns=turns, reference=answers, meta={"category": _range(sum(marks))})


def _range(images: int) -> str:
    """Return the group of a dialogue in reports, by its number of images."""
    return "2-5 images" if images <= 5 else "6-10 images" if images <= 10 else "11-20 images"


def _wrong(name: str, what: str) -> SetupError:
    return SetupError(f"data of task 'mmdu': dialogue {quote(name)} {what}. Correct the row.")
