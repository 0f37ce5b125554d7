"""What learned methods are trained on: the target model's own answers to questions that no evaluation asks.

    traces = collect(loaded, built_in(("walk", "lookup"), 512, seed=0), correct=True)
    traces = collect(loaded, prompts_of("questions.jsonl", loaded), max_new_tokens=512)

Problems of the built-in tasks are drawn from the 40 bits of seeds that `HELD_OUT` lies outside of.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench import registry
from kvbench.data import read_jsonl
from kvbench.engine.loop import Engine
from kvbench.engine.model import LoadedModel
from kvbench.errors import UserError, show
from kvbench.records import Request, Sampling
from kvbench.synthetic.cells import CELLS
from kvbench.synthetic.problem import HELD_OUT
from kvbench.task import Doc, Turn
from kvbench.task_names import get_task
from kvbench.train.maths import judge

SEED_BITS = 29  # below HELD_OUT = 10^9
SLOTS = 32
Judge = Callable[[str], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt, the longest answer it may have, and whether an answer is right (None: nobody knows)."""

    name: str
    ids: tuple[int, ...]
    max_new_tokens: int
    right: Judge | None = None


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

    A field ``answer``, LaTeX or a number, says what is right.
    """
    from kvbench.prompts import template_text
    from kvbench.reader import ModelReader

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
            right = judge(str(row["answer"])) if "answer" in row else None
            longest = min(max_new_tokens, room)
            questions.append(Question(name=f"line-{line}", ids=ids, max_new_tokens=longest, right=right))
    return questions


def collect(
    loaded: LoadedModel,
    questions: Iterable[Question],
    *,
    correct: bool = True,
    sampling: Sampling | None = None,
    seed: int = 0,
    tick: Callable[[int], None] | None = None,
) -> list[Trace]:
    """The model's answers under the full cache, in the order of the questions; with `correct` only right ones, where
    that can be told.
    """
    asked = {q.name: q for q in questions}
    if not asked:
        return []
    longest = max(len(q.ids) + q.max_new_tokens for q in asked.values())
    full = registry.methods.get("full")()
    engine = Engine(loaded, full, budget=None, interval=128, slots=min(SLOTS, len(asked)), max_tokens=longest)
    todo = [
        Request(
            task="train",
            doc_id=q.name,
            prompt_ids=q.ids,
            max_new_tokens=q.max_new_tokens,
            sampling=sampling or Sampling(),
            seed=seed,
        )
        for q in asked.values()
    ]
    found: dict[str, Trace] = {}
    for done, answer in enumerate(engine.generate(todo), start=1):
        question = asked[answer.request.doc_id]
        if answer.status == "ok" and not (correct and question.right and not question.right(answer.text)):
            found[question.name] = Trace(name=question.name, prompt=question.ids, answer=answer.token_ids)
        if tick:
            tick(done)
    return [found[name] for name in asked if name in found]
