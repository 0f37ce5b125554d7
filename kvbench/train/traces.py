"""The questions that recipes train on, and the traces: questions with the model's own or with given answers.

Problems of built-in tasks have a seed. Recipes train on problems with 29-bit seeds. Evaluations and held-out figures
use larger seeds, from `HELD_OUT` on, so they never ask a problem on which a recipe trains.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from kvbench.engine.loop import Engine
from kvbench.engine.model.load import LoadedModel
from kvbench.errors import SetupError, UserError, quote
from kvbench.records import Request
from kvbench.replay.traces import ForcedTrace
from kvbench.scoring.pool import ScorePool
from kvbench.task import Doc, Output
from kvbench.taskkit.math_task import MathTask
from kvbench.taskkit.names import get_task
from kvbench.taskkit.synthetic.problem import HELD_OUT
from kvbench.taskkit.synthetic.variants import VARIANTS, Variant
from kvbench.train.answers import Answer, Answers, SharedAnswers
from kvbench.train.collection import Collection
from kvbench.train.generation_memory import collecting, slots_for
from kvbench.train.processes import Processes

SEED_BITS = 29  # below HELD_OUT = 10^9
Judge = Callable[[str], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt, and the most tokens that its answer may have.

    judge: says whether a text is a right answer; None if no right answer is known. reference: the right answer of a
    question that comes from a file. given: an answer that training uses instead of the model's own.
    """

    name: str
    ids: tuple[int, ...]
    max_new_tokens: int
    judge: Judge | None = None
    reference: str | None = None
    given: tuple[int, ...] | None = None

    def is_right(self, answer: str) -> bool:
        """Return whether the question's judge finds the answer right; call it only for questions with a judge."""
        assert self.judge is not None
        return self.judge(answer)

    def given_answer(self) -> Answer:
        """Return the given answer, cut to the most tokens that an answer may have; call it only if there is one.

        It counts as right without a comparison.
        """
        assert self.given is not None
        return Answer(self.given[: self.max_new_tokens], right=True, ended=len(self.given) <= self.max_new_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A prompt and its answer, the model's own or a given one, up to the end token or to the length limit."""

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


def judge(reference: str, thinks: bool | None = None) -> Judge:
    """Return a function that says whether a text gives the right answer `reference` (LaTeX or a number).

    It compares as the mathematics tasks do. A comparison that takes too long counts as wrong. thinks: whether the text
    begins with a thinking block; None if unknown.
    """
    doc = Doc(doc_id="", turns=(), reference=reference)

    def right(text: str) -> bool:
        output = Output(text=text, stop_reason="", prompt_tokens=0, output_tokens=0, thinking=thinks)
        return bool(_pool().submit(MathTask(), doc, output).result().value)

    return right


@cache
def _pool() -> ScorePool:
    return ScorePool()


def collect(
    loaded: LoadedModel,
    questions: Iterable[Question],
    collection: Collection | None = None,
    *,
    seed: int = 0,
    file: SharedAnswers | None = None,
    processes: Processes | None = None,
    on_answer: Callable[[int], None] | None = None,
    on_drop: Callable[[str], None] | None = None,
) -> list[Trace]:
    """Let the model answer the questions with the full cache; return the usable answers in the questions' order.

    Questions with a given answer are not asked. Several processes share the others out; each then has all answers.

    Args:
        seed: the seed of the sampling noise.
        file: answers in it are not generated again; new ones are added to it. Several processes need it.
        on_answer: called with the number of answers so far: those stored before, and this process's own.
        on_drop: called for every answer that is not used, with the reason.
    """
    collection, asked = collection or Collection(), {q.name: q for q in questions}
    answers = {q.name: q.given_answer() for q in asked.values() if q.given is not None}
    if open_questions := {name: q for name, q in asked.items() if q.given is None}:
        answers |= _ask(loaded, open_questions, collection, seed, file, processes or Processes(), on_answer)
    traces = []
    for q in asked.values():
        if reason := unusable(answers[q.name], collection):
            if on_drop:
                on_drop(reason)
        else:
            traces.append(Trace(name=q.name, prompt=q.ids, answer=answers[q.name].ids[: collection.truncate or None]))
    return traces


def unusable(answer: Answer, collection: Collection) -> str:
    """Return why training does not use an answer; "" if it uses the answer."""
    if not answer.ids or (not answer.right and collection.wrong == "drop"):
        return "wrong" if answer.ids else "failed"
    if not answer.ended and collection.unfinished == "drop":
        return "unfinished"
    return f"shorter than {collection.min_tokens} tokens" if len(answer.ids) < collection.min_tokens else ""


def _ask(
    loaded: LoadedModel,
    asked: Mapping[str, Question],
    collection: Collection,
    seed: int,
    file: SharedAnswers | None,
    processes: Processes,
    on_answer: Callable[[int], None] | None,
) -> Answers:
    """Let the model answer this process's share of the questions that have no stored answer; return all answers."""
    answers: Answers = file.gather() if file else {}
    todo = [
        Request(
            task="train",
            doc_id=q.name,
            prompt_ids=q.ids,
            max_new_tokens=q.max_new_tokens,
            sampling=collection.sampling,
            seed=seed,
        )
        for q in asked.values()
        if q.name not in answers
    ][processes.rank :: processes.count]
    if todo:
        # Sizes as if this process answered all: the last bits of logits depend on the shapes of the batch.
        longest = max(len(q.ids) + q.max_new_tokens for q in asked.values())
        how = collecting(longest, len(asked))
        slots = slots_for(loaded, how)
        engine = Engine(loaded, how.method, budget=None, interval=how.interval, slots=slots, max_tokens=longest)
        for done in engine.generate(todo):
            q = asked[done.request.doc_id]
            right = done.status == "ok" and (q.judge is None or q.is_right(done.text))
            answers[q.name] = answer = Answer(done.token_ids, right=right, ended=done.stop_reason == "stop")
            if file:
                file.add(q.name, q.ids, answer)
            if on_answer:
                on_answer(len(answers))
    if file and processes.count > 1:
        answers = file.gather()
        if lacking := len(asked.keys() - answers.keys()):
            raise SetupError(
                f"{lacking} answers of other processes are not in {quote(file.common.path)}; give an --out that all "
                "processes share."
            )
        if on_answer:
            on_answer(len(answers))
    return answers
