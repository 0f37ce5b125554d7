"""Writes the stored answers to a question as one HTML page, with the question's images in their places."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from kvbench.cli import samples
from kvbench.cli.run_questions import RunQuestions, texts
from kvbench.errors import UserError
from kvbench.report.image_list import ListedImage, images, split
from kvbench.report.page.question import Answer, Asked
from kvbench.report.page.question import write as write_page
from kvbench.task import Doc, Turn
from kvbench.taskkit.names import is_gated

GATED = "The task's data are gated: the page shows ids and scores, no texts."
NOT_STORED = "The run stored no prompt of this question, as runs do for gated data: the page shows scores, no texts."


def write(entries: list[dict[str, Any]], questions: RunQuestions, path: Path, *, run: str) -> Path:
    """Write a page with these samples to `path`. entries: rows with their texts. Raises SetupError if the page cannot
    be written, or if Pillow is missing."""
    return write_page([_asked(group, questions) for group in samples.by_prompt(entries)], path, run=run)


def _asked(group: list[dict[str, Any]], questions: RunQuestions) -> Asked:
    first = group[0]
    title = f"{first['task']}: {first['doc_id']}"
    withheld = GATED if is_gated(first["task"]) else NOT_STORED if first["prompt"] is None else ""
    answers = [_answer(entry, withheld=bool(withheld)) for entry in group]
    if withheld:
        return Asked(title=title, turns=(), places=(), uris={}, reference="", answers=answers, notes=[withheld])
    doc, listed = questions.of(first), images(first.get("image_list"))
    talk = any("turns" in entry for entry in group)  # a sample that failed in its first turn has no turns
    turns = [split(first["prompt"], listed), *(_later(doc, listed) if doc is not None and talk else ())]
    placed = {part.number for turn in turns for part in turn if isinstance(part, ListedImage)}
    notes = []
    if doc is None and (listed or talk):
        cause = questions.missing(first["task"])
        notes.append(f"{cause[0].upper()}{cause[1:]}: later turns and images are missing.")
    uris: dict[int, str] = {}
    if doc is not None and listed:
        try:
            uris = questions.uris(doc, first)
        except UserError as error:
            notes.append(f"The images are missing: {error}")
    return Asked(
        title=title,
        turns=turns,
        places=[image for image in listed if image.number not in placed],
        uris=uris,
        reference=first.get("reference", ""),
        answers=answers,
        notes=notes,
    )


def _later(doc: Doc, listed: list[ListedImage]) -> list[list[str | ListedImage]]:
    """Return the question of each turn after the first, as a list of its texts and images. The images are left out if
    the question's data have more or fewer images than the row lists."""
    left = iter(listed[len(doc.turns[0].images) :])
    if sum(len(turn.images) for turn in doc.turns) != len(listed):
        left = iter(())
    return [_parts(turn, list(itertools.islice(left, len(turn.images)))) for turn in doc.turns[1:]]


def _parts(turn: Turn, own: list[ListedImage]) -> list[str | ListedImage]:
    parts: list[str | ListedImage] = []
    for text, image in itertools.zip_longest(texts(turn), own):
        parts += [text, *([image] if image else [])]
    return parts


def _answer(entry: dict[str, Any], *, withheld: bool) -> Answer:
    outputs = [turn["output"] for turn in entry["turns"]] if "turns" in entry else [entry["output"] or ""]
    return Answer(
        title=samples.heading(entry),
        facts=samples.facts(entry),
        outputs=[] if withheld else outputs,
        extracted="" if withheld else entry.get("extracted", ""),
    )
