"""The questions that recipes train on, and traces: questions with an answer of the model or from the data.

Problems of built-in tasks have a seed. The questions to train on have 29-bit seeds. Evaluations and held-out questions
have larger seeds, from `HELD_OUT` on, so they never have a seed on which a recipe trains.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from kvbench.engine.loop import Engine
from kvbench.engine.model.load import LoadedModel
from kvbench.errors import SetupError, UserError, quote
from kvbench.records import Request, Sampling
from kvbench.replay.traces import ForcedTrace
from kvbench.scoring.pool import ScorePool
from kvbench.task import Output
from kvbench.taskkit.math_task import MathTask, math_doc
from kvbench.taskkit.names import get_task
from kvbench.taskkit.prompts import PLAIN, Style
from kvbench.taskkit.synthetic.problem import HELD_OUT
from kvbench.taskkit.synthetic.variants import VARIANTS, Variant
from kvbench.train.answers import Answer, Answers, SharedAnswers
from kvbench.train.collection import Collection
from kvbench.train.generation_memory import collecting, slots_for
from kvbench.train.processes import Processes

SEED_BITS = 29  # below HELD_OUT = 10^9
ENDED = ("stop", "stop_string")  # why an answer may end before its most tokens
Judge = Callable[[str], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt that the model answers with at most `max_new_tokens` tokens.

    judge: returns whether a text is a right answer; None if no right answer is known. reference: the right answer that
    a data file states. given: the data file's own answer, which training uses instead of an answer of the model.
    stop_strings: texts that end an answer of the model.
    """

    name: str
    ids: tuple[int, ...]
    max_new_tokens: int
    judge: Judge | None = None
    reference: str | None = None
    given: tuple[int, ...] | None = None
    stop_strings: tuple[str, ...] = ()

    def is_right(self, answer: str) -> bool:
        """Return whether the question's judge finds `answer` right. Only for questions with a judge."""
        assert self.judge is not None
        return self.judge(answer)

    def request(self, name: str, samples: int = 1, sampling: Sampling | None = None, seed: int = 0) -> Request:
        """Return a request for `samples` answers; `name` and `seed` determine the sampling noise."""
        return Request(
            task="train",
            doc_id=name,
            prompt_ids=self.ids,
            samples=tuple(range(samples)),
            max_new_tokens=self.max_new_tokens,
            sampling=sampling or Sampling(),
            seed=seed,
            stop_strings=self.stop_strings,
        )

    def given_answer(self) -> Answer:
        """Return the answer `given`, cut to `max_new_tokens`. Only for questions with a given answer. It counts as
        right; the judge does not see it."""
        assert self.given is not None
        return Answer(self.given[: self.max_new_tokens], right=True, ended=len(self.given) <= self.max_new_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A prompt with an answer of the model or from the data. The answer may be cut."""

    name: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt + self.answer

    def forced(self, seed: int = 0) -> ForcedTrace:
        """Return the trace in the form that a replay reads: a request that contains its answer. seed: the seed of
        random draws by the eviction method."""
        request = Request(task="train", doc_id=self.name, prompt_ids=self.prompt, max_new_tokens=len(self.answer))
        return ForcedTrace(request=replace(request, forced=self.answer, seed=seed), cluster=self.name)


def built_in(
    tasks: Sequence[str], count: int, seed: int, loaded: LoadedModel, *, held_out: bool = False
) -> list[Question]:
    """Return `count` problems of the tasks as questions: one problem of each task in turn. held_out: take problems on
    which no recipe trains, the same for every `seed`. Raises UserError if a task has no training problems."""
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


def judge(reference: str, thinks: bool | None = None, style: Style = PLAIN) -> Judge:
    """Return a function that decides whether a text states the right answer `reference` (LaTeX or a number).

    The function compares answers as the mathematics tasks do. If a comparison takes too long, the text counts as wrong.
    thinks: whether the text begins with a thinking block; None if unknown. style: the question's prompt style.
    """
    doc = math_doc("", (), reference, style)

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
    """Let the model answer the questions with the full cache; return the usable answers as traces.

    The traces have the order of the questions. The model does not answer questions that have a given answer: their
    traces have the given answer. Several processes divide the other questions among them; each process returns all
    traces. Raises SetupError if the answers of another process are not in `file`.

    Args:
        seed: the seed of the sampling noise.
        file: stores the answers; stored answers are not generated again. Required if `processes` has several processes.
        on_answer: called with the number of answers so far: those stored earlier, and new ones of this process. With
            several processes, a last call counts the answers of all processes.
        on_drop: called with the reason for every answer that training does not use.
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
    """Return why training cannot use an answer; "" if it can."""
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
    """Let the model answer this process's share of those questions that have no stored answer. Returns the answers of
    all processes. Raises SetupError if answers of other processes are not in `file`."""
    answers: Answers = file.gather() if file else {}
    left = [q for q in asked.values() if q.name not in answers][processes.rank :: processes.count]
    todo = [q.request(q.name, sampling=collection.sampling, seed=seed) for q in left]
    if todo:
        # Slots as if this process answered all questions, so that its share does not change the answers: the last bits
        # of logits depend on the batch size.
        longest = max(len(q.ids) + q.max_new_tokens for q in asked.values())
        how = collecting(longest, len(asked), collection.sampling)
        slots = slots_for(loaded, how)
        engine = Engine(loaded, how.method, budget=None, interval=how.interval, slots=slots, max_tokens=longest)
        for done in engine.generate(todo):
            q = asked[done.request.doc_id]
            whole = done.status == "ok"  # tokens before a logit that is no number are no answer
            right = whole and (q.judge is None or q.is_right(done.text))
            ids = done.token_ids if whole else ()
            answers[q.name] = answer = Answer(ids, right=right, ended=done.stop_reason in ENDED)
            if file:
                file.add(q.name, q.ids, answer)
            if on_answer:
                on_answer(len(answers))
    if file and processes.count > 1:
        answers = file.gather()
        if lacking := len(asked.keys() - answers.keys()):
            raise SetupError(
                f"{lacking} answers of other processes are not in {quote(file.common.path)}; give an --out in a "
                "folder that all processes share."
            )
        if on_answer:
            on_answer(len(answers))
    return answers
