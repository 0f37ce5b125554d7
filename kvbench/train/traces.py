"""The questions that recipes train on, and the traces: the model's own answers to these questions.

Problems of built-in tasks have a seed. Recipes train on problems with 29-bit seeds. Evaluations and held-out figures
use larger seeds, from `HELD_OUT` on, so they never ask a problem on which a recipe trains.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from kvbench import registry
from kvbench.engine.loop import Engine
from kvbench.engine.model.load import LoadedModel
from kvbench.errors import UserError, bare, quote
from kvbench.records import Request
from kvbench.replay.traces import ForcedTrace
from kvbench.scoring.pool import ScorePool
from kvbench.sources.data import read_jsonl
from kvbench.task import Doc, Output, Turn
from kvbench.taskkit.math_task import MathTask
from kvbench.taskkit.names import get_task
from kvbench.taskkit.synthetic.problem import HELD_OUT
from kvbench.taskkit.synthetic.variants import VARIANTS, Variant
from kvbench.train.answers import AnswerFile, Answers

SEED_BITS = 29  # below HELD_OUT = 10^9
SLOTS = 32
Judge = Callable[[str], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt, and the most tokens that its answer may have.

    judge: says whether a text is a right answer; None if no right answer is known. reference: the right answer of a
    question that comes from a file.
    """

    name: str
    ids: tuple[int, ...]
    max_new_tokens: int
    judge: Judge | None = None
    reference: str | None = None

    def is_right(self, answer: str) -> bool:
        """Return whether the question's judge finds the answer right; call it only for questions with a judge."""
        assert self.judge is not None
        return self.judge(answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A prompt and the model's answer to it, up to the end token or to the length limit."""

    name: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt + self.answer

    def forced(self, seed: int = 0) -> ForcedTrace:
        """Return the trace in the form that a replay reads: a request that brings its answer.

        seed: the seed of the method's random draws.
        """
        request = Request(task="train", doc_id=self.name, prompt_ids=self.prompt, max_new_tokens=len(self.answer))
        return ForcedTrace(request=replace(request, forced=self.answer, seed=seed), cluster=self.name)


def built_in(
    tasks: Sequence[str], count: int, seed: int, loaded: LoadedModel, *, held_out: bool = False
) -> list[Question]:
    """Return `count` problems of the built-in tasks as questions, taken from the tasks in turn.

    held_out: use the problems that evaluations use, for held-out figures.
    """
    drawn = [get_task(name) for name in tasks]
    if unknown := [t.name for t in drawn if t.suite != "synthetic"]:
        raise UserError(f"task {quote(unknown[0])} has no training problems; give --data FILE.")
    draw = random.Random(f"kvbench-train-{seed}")
    questions = []
    for index in range(count):
        variant = VARIANTS[drawn[index % len(drawn)].variant]
        number = HELD_OUT + index if held_out else draw.getrandbits(SEED_BITS)
        problem = variant.generate(number)
        ids = loaded.tokenizer(problem.prompt)["input_ids"]
        longest = len(problem.solution_pieces) + 16
        name = f"{variant.name}-{number}"
        questions.append(Question(name=name, ids=tuple(ids), max_new_tokens=longest, judge=_exact(variant, number)))
    return questions


def _exact(variant: Variant, number: int) -> Judge:
    return lambda text: bool(variant.score(variant.generate(number), text).exact)


def judge(reference: str) -> Judge:
    """Return a function that says whether a text gives the right answer `reference` (LaTeX or a number).

    It compares as the mathematics tasks do. A comparison that takes too long counts as wrong.
    """
    doc = Doc(doc_id="", turns=(), reference=reference)

    def right(text: str) -> bool:
        output = Output(text=text, stop_reason="", prompt_tokens=0, output_tokens=0)
        return bool(_pool().submit(MathTask(), doc, output).result().value)

    return right


@cache
def _pool() -> ScorePool:
    return ScorePool()


def prompts_of(path: str | Path, loaded: LoadedModel, max_new_tokens: int) -> list[Question]:
    """Return the questions of a JSON-lines file, put into the chat template if the tokenizer has one.

    The field ``question`` or ``prompt`` is the text, the optional field ``answer`` the right answer (LaTeX or a
    number). Answers end after `max_new_tokens` or at the end of the model's context; a question that fills the context
    is skipped.
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
            raise UserError(f"{bare(path)}:{line}: field 'question' is missing or empty; give the question as a text.")
        doc = Doc(doc_id=str(line), turns=(Turn(question=text),), reference=None)
        ids = tuple(reader.ids(reader.text(doc, thinking=None)))
        if (most := min(max_new_tokens, loaded.context - len(ids))) > 0:
            reference = str(row["answer"]) if "answer" in row else None
            scored: dict[str, Any] = (
                {"judge": judge(reference), "reference": reference} if reference is not None else {}
            )
            questions.append(Question(name=f"line-{line}", ids=ids, max_new_tokens=most, **scored))
    return questions


def collect(
    loaded: LoadedModel,
    questions: Iterable[Question],
    *,
    correct: bool = True,
    file: AnswerFile | None = None,
    on_answer: Callable[[int], None] | None = None,
) -> list[Trace]:
    """Let the model answer the questions greedily with the full cache; return the answers in the questions' order.

    Answers whose generation failed are left out.

    Args:
        correct: drop wrong answers to questions that have a judge.
        file: answers in it are not generated again; new ones are added to it.
        on_answer: called with the number of answers so far.
    """
    asked = {q.name: q for q in questions}
    answers: Answers = file.read() if file else {}
    todo = [
        Request(task="train", doc_id=q.name, prompt_ids=q.ids, max_new_tokens=q.max_new_tokens)
        for q in asked.values()
        if q.name not in answers
    ]
    if todo:
        # Sizes as if no answer were stored: the last bits of logits depend on the shapes of the batch.
        longest = max(len(q.ids) + q.max_new_tokens for q in asked.values())
        full = registry.methods.get("full")()
        engine = Engine(loaded, full, budget=None, interval=128, slots=min(SLOTS, len(asked)), max_tokens=longest)
        for answer in engine.generate(todo):
            q, ids = asked[answer.request.doc_id], answer.token_ids
            kept = answer.status == "ok" and not (correct and q.judge and not q.is_right(answer.text))
            answers[q.name] = ids if kept else None
            if file:
                file.add(q.name, prompt=q.ids, answer=ids, kept=kept)
            if on_answer:
                on_answer(len(answers))
    pairs = ((q, answers[q.name]) for q in asked.values())
    return [Trace(name=q.name, prompt=q.ids, answer=ids) for q, ids in pairs if ids is not None]
