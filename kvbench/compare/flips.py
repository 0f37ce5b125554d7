"""Lists the questions whose score changed, with both answers side by side. The question whose score fell most comes
first.

Answers come from run folders; a baseline file has no texts. Answers to gated questions are withheld, because they may
quote the question.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from kvbench.compare import words
from kvbench.compare.cell import Cell
from kvbench.compare.matching import Pair
from kvbench.compare.outcome import Outcome
from kvbench.compare.stored import Stored
from kvbench.console.terminal import clean
from kvbench.errors import bare
from kvbench.report.render import md
from kvbench.store.schema import natural
from kvbench.taskkit.names import is_gated

MOST = 20  # questions of a cell that are listed
TAIL = 160  # number of characters that are shown, from the end of an answer
WITHHELD = "(withheld: the task's questions are gated)"
NOT_HERE = "(this side stores no texts of answers)"
ANSWERS = f"[the extracted answer, which the task scores] and the end of the output, at most {TAIL} characters"
NONE = "No question changed its score."


@dataclass(frozen=True, slots=True)
class Answer:
    extracted: str
    tail: str


@dataclass(frozen=True, slots=True)
class Flip:
    """A question whose mean score changed. base, new: the mean score on each side, over the samples that both sides
    have. sample: the number of the first sample whose score changed in the same direction as the mean score. answers:
    base's and new's answer in this sample."""

    cell: str
    question: str
    base: float
    new: float
    sample: int
    answers: tuple[Answer, Answer]


def flips(outcome: Outcome) -> Iterator[tuple[str, list[Flip], int]]:
    """Yield (cell in words, changed questions, number of changed questions) for each cell in which the score of a
    question changed. The list has at most `MOST` questions, the largest fall first; the number counts all changed
    questions. A cell that was run with two seeds is yielded once for each seed with a change."""
    stored = Stored(outcome.base), Stored(outcome.new)
    for one in outcome.judged:
        for pair in one.pairs:
            changed = sorted(_changed(pair), key=lambda found: (found[2] - found[1], natural(found[0])))
            if changed:
                stage = f", seed {bare(pair.key.seed)}" if len(one.pairs) > 1 else ""
                cell = words.name(one, outcome) + stage
                yield cell, [_flip(cell, pair, found, stored) for found in changed[:MOST]], len(changed)


def _changed(pair: Pair) -> Iterator[tuple[str, float, float, int]]:
    """Yield (question, old mean, new mean, sample) for each question whose mean score changed; see `Flip`."""
    for name in pair.shared:
        mine, theirs = pair.base.questions[name].scores, pair.new.questions[name].scores
        both = [(s, a, b) for s, (a, b) in enumerate(zip(mine, theirs)) if a is not None and b is not None]
        if both and (delta := sum(b - a for _, a, b in both)):
            sample = next(s for s, a, b in both if (b - a) * delta > 0)
            yield name, sum(a for _, a, _ in both) / len(both), sum(b for _, _, b in both) / len(both), sample


def _flip(cell: str, pair: Pair, found: tuple[str, float, float, int], stored: tuple[Stored, Stored]) -> Flip:
    question, base, new, sample = found
    sides = zip(stored, (pair.base, pair.new))
    old, now = (_answer(store, side, question, sample) for store, side in sides)
    return Flip(cell, question, base, new, sample, (old, now))


def _answer(stored: Stored, cell: Cell, question: str, sample: int) -> Answer:
    if is_gated(cell.key.task):
        return Answer("", WITHHELD)
    row = stored.answer(cell, question, sample)
    if row is None:
        return Answer("", NOT_HERE)
    output, extracted = (value if isinstance(value := row.get(name), str) else "" for name in ("output", "extracted"))
    whole = re.sub(r"\s+", " ", output)
    return Answer(extracted, whole if len(whole) <= TAIL else f"...{whole[-TAIL:]}")


def documents(outcome: Outcome) -> Iterator[dict[str, Any]]:
    """Yield the questions whose score changed as JSON objects, at most `MOST` per cell and seed."""
    for _, found, _ in flips(outcome):
        yield from map(asdict, found)


def text(outcome: Outcome) -> str:
    lines = []
    for cell, found, count in flips(outcome):
        lines += [f"{cell}: {_count(count)}", ""]
        for flip in found:
            lines.append(f"  {clean(flip.question)}  {flip.base:.3f} > {flip.new:.3f}  sample {flip.sample}")
            for side, answer in zip(("base", "new "), flip.answers):
                lines.append(f"    {side}  {_shown(answer)}")
        lines.append("")
    head = [
        "Each question with its mean score in BASE > NEW and the first sample whose score changed in the same "
        "direction. Below it, per side:",
        f"{ANSWERS}.",
    ]
    return "\n".join([*head, "", *lines]).rstrip() if lines else NONE


def markdown(outcome: Outcome) -> str:
    lines = ["## Questions whose score changed", "", f"base, new: mean scores; answers: {md(ANSWERS)}.", ""]
    head = len(lines)
    for cell, found, count in flips(outcome):
        lines += [f"### {md(cell)}: {_count(count)}", "", "| question | base | new | base answers | new answers |"]
        lines.append("|---|---:|---:|---|---|")
        for flip in found:
            answers = " | ".join(md(_shown(answer)) for answer in flip.answers)
            lines.append(f"| {md(flip.question)} | {flip.base:.3f} | {flip.new:.3f} | {answers} |")
        lines.append("")
    return "\n".join(lines) if len(lines) > head else NONE


def _shown(answer: Answer) -> str:
    extracted = f"[{clean(answer.extracted)}] " if answer.extracted else ""
    return f"{extracted}{clean(answer.tail)}"


def _count(count: int) -> str:
    shown = "1 question changed its score" if count == 1 else f"{count} questions changed their score"
    return shown + (f"; the first {MOST}" if count > MOST else "")
