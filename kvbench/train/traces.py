"""What learned methods are trained on: the target model's own answers to questions that no evaluation asks.

    traces = collect(loaded, built_in(("walk", "lookup"), 512, seed=0), correct=True)
    traces = collect(loaded, prompts_of("questions.jsonl", loaded, 4096), file=AnswerFile(...))

Problems of the built-in tasks are drawn from the 40 bits of seeds that `HELD_OUT` lies outside of.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench import registry
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import LoadedModel
from kvbench.errors import UserError, show
from kvbench.records import Request
from kvbench.sources.data import read_jsonl
from kvbench.task import Doc, Turn
from kvbench.taskkit.names import get_task
from kvbench.taskkit.synthetic.cells import CELLS
from kvbench.taskkit.synthetic.problem import HELD_OUT
from kvbench.train.answers import AnswerFile, Answers
from kvbench.train.maths import judge

SEED_BITS = 29  # below HELD_OUT = 10^9
SLOTS = 32
Judge = Callable[[str], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt, the longest answer it may have, and whether an answer is right (None: nobody knows).

    reference: what answers to questions of a file are compared with.
    """

    name: str
    ids: tuple[int, ...]
    max_new_tokens: int
    right: Judge | None = None
    reference: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A prompt and the model's own answer to it, its end token included."""

    name: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt + self.answer


def built_in(
    tasks: Sequence[str], count: int, seed: int, loaded: LoadedModel, *, held_out: bool = False
) -> list[Question]:
    """Problems of the built-in tasks, `count` in all, taking turns; the held-out ones are those of evaluation."""
    names = [get_task(name) for name in tasks]
    if unknown := [t.name for t in names if t.suite != "synthetic"]:
        raise UserError(f"task {show(unknown[0])} has no training problems; give --data FILE.")
    draw = random.Random(f"kvbench-train-{seed}")
    questions = []
    for index in range(count):
        cell = CELLS[names[index % len(names)].variant]
        number = HELD_OUT + index if held_out else draw.getrandbits(SEED_BITS)
        problem = cell.generate(number)
        ids = loaded.tokenizer(problem.prompt)["input_ids"]
        right = _exact(cell, number)
        longest = len(problem.trace_pieces) + 16
        questions.append(Question(name=f"{cell.name}-{number}", ids=tuple(ids), max_new_tokens=longest, right=right))
    return questions


def _exact(cell: object, number: int) -> Judge:
    def right(text: str) -> bool:
        return bool(cell.score(cell.generate(number), text)[0])  # type: ignore[attr-defined]

    return right


def prompts_of(path: str | Path, loaded: LoadedModel, max_new_tokens: int) -> list[Question]:
    """Questions of a JSON-lines file with the field ``question`` or ``prompt``, through the chat template if any.

    A field ``answer``, LaTeX or a number, says what is right. An answer ends after `max_new_tokens`, or sooner where
    the model's context does; a question that fills the context is left out.
    """
    from kvbench.taskkit.prompts import template_text
    from kvbench.taskkit.reader import ModelReader

    chat = template_text(loaded.tokenizer) is not None
    reader = ModelReader(
        tokenizer=loaded.tokenizer, model_type=loaded.model.config.model_type, context=loaded.context, chat=chat
    )
    questions = []
    for line, row in read_jsonl(Path(path), str(path)):
        text = row.get("question", row.get("prompt"))
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"{show(path)[1:-1]}:{line}: field 'question' is missing or empty.")
        doc = Doc(doc_id=str(line), turns=(Turn(question=text),), reference=None)
        ids = tuple(reader.ids(reader.text(doc, thinking=None)))
        room = loaded.context - len(ids)
        if room > 0:
            reference = str(row["answer"]) if "answer" in row else None
            right = None if reference is None else judge(reference)
            longest = min(max_new_tokens, room)
            name = f"line-{line}"
            questions.append(Question(name=name, ids=ids, max_new_tokens=longest, right=right, reference=reference))
    return questions


def collect(
    loaded: LoadedModel,
    questions: Iterable[Question],
    *,
    correct: bool = True,
    file: AnswerFile | None = None,
    tick: Callable[[int], None] | None = None,
) -> list[Trace]:
    """The model's greedy answers under the full cache, in the order of the questions; with `correct` only right ones,
    where that can be told. Those that are in the file are not asked for again, and the others are written there.
    """
    asked = {q.name: q for q in questions}
    found: Answers = file.read() if file else {}
    todo = [
        Request(task="train", doc_id=q.name, prompt_ids=q.ids, max_new_tokens=q.max_new_tokens)
        for q in asked.values()
        if q.name not in found
    ]
    if todo:
        # As if all were asked: what a model says depends in its last bits on the shapes in which it is asked.
        longest = max(len(q.ids) + q.max_new_tokens for q in asked.values())
        full = registry.methods.get("full")()
        engine = Engine(loaded, full, budget=None, interval=128, slots=min(SLOTS, len(asked)), max_tokens=longest)
        for answer in engine.generate(todo):
            q, ids = asked[answer.request.doc_id], answer.token_ids
            kept = answer.status == "ok" and not (correct and q.right and not q.right(answer.text))
            found[q.name] = ids if kept else None
            if file:
                file.add(q.name, prompt=q.ids, answer=ids, kept=kept)
            if tick:
                tick(len(found))
    answers = ((q, found[q.name]) for q in asked.values())
    return [Trace(name=q.name, prompt=q.ids, answer=ids) for q, ids in answers if ids is not None]
