"""Sets up a recipe for training: loads the model, and lets it answer the recipe's questions."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.engine.model.load import LoadedModel, load, refuse_training
from kvbench.errors import UserError, quote
from kvbench.sources import models
from kvbench.train.answers import AnswerFile
from kvbench.train.catalogue import RECIPES, Entry
from kvbench.train.head_data import Example, examples, source
from kvbench.train.lock import alone
from kvbench.train.processes import own_device
from kvbench.train.recipe import Recipe, Settings, check_least
from kvbench.train.traces import Question, Trace, built_in, collect, prompts_of

ANSWERS = "answers.jsonl"


@dataclass(frozen=True, slots=True)
class Ready:
    """A recipe that is ready to train, with its data, and the model that it trains for."""

    recipe: Recipe
    loaded: LoadedModel
    revision: str | None


def prepare(
    name: str,
    model: str,
    *,
    data: str | None,
    samples: int,
    steps: int,
    lr: float,
    batch: int,
    seed: int,
    options: Mapping[str, Any],
    device: str,
    out: Path,
    on_answer: Callable[[int], None] | None = None,
) -> Ready:
    """Load the model, let it answer the questions, and return the recipe called `name`, ready to train.

    data: a file with questions; None: problems of the built-in tasks. samples: the most questions or examples to train
    on, without those that the recipe holds out. out: the folder of the training, where the answers are stored.
    on_answer: called with the number of answers so far.
    """
    entry = RECIPES[name]
    info = models.describe(model)
    loaded = load(info.where, device=own_device(device), dtype=entry.dtype)
    refuse_training(loaded)
    revision = models.revision(models.describe(model))  # described again: loading may just have fetched the model
    module, _, cls = entry.location.partition(":")
    make: Any = getattr(importlib.import_module(module), cls)  # a subclass of Recipe
    make.check(loaded, options)
    about = Path(data).name if data else ", ".join(entry.tasks) or source(loaded)
    items: Sequence[Question | Trace | Example]
    test: Sequence[Question | Trace | Example]
    if entry.learns_from == "examples":
        if data is not None:
            raise UserError(f"{name} has its own training texts; it takes no --data.")
        drawn = examples(loaded, samples + entry.held_out, seed, int(options["tokens"]))
        items, test = drawn[:samples], drawn[samples:]
    else:
        if not loaded.stop_ids:
            raise UserError(
                f"model {quote(model)} has no end token, so its answers would never end; add it to "
                "generation_config.json."
            )
        longest = int(options["longest"])
        questions, held_out = _questions(entry, loaded, data, samples, seed, longest)
        items, test = questions, held_out
        judged = all(q.judge for q in (*questions, *held_out))
        if "questions" in (entry.learns_from, entry.tested_on) and not judged:
            raise UserError(f"{name} needs right answers: give every line of --data a field 'answer'.")
        if entry.learns_from == "answers":
            asked: dict[str, Any] = {
                "model": model,
                "revision": revision,
                "fingerprint": loaded.fingerprint,
                "data": about,
            }
            asked |= {"samples": samples, "held_out": entry.held_out, "seed": seed, "longest": longest}
            items, test = _answered(
                entry, loaded, questions, held_out, data=data, asked=asked, out=out, on_answer=on_answer
            )
    data_hash = _hash([item.ids for item in (*items, *test)])
    more = dict(options) | {"data": about, "samples": samples, "data_sha256": data_hash}
    settings = Settings(steps=steps, lr=lr, batch=batch, seed=seed, more=more)
    return Ready(make(loaded, settings, items, test), loaded, revision)


def _answered(
    entry: Entry,
    loaded: LoadedModel,
    questions: list[Question],
    held_out: list[Question],
    *,
    data: str | None,
    asked: dict[str, Any],
    out: Path,
    on_answer: Callable[[int], None] | None,
) -> tuple[list[Trace], Sequence[Question | Trace]]:
    """Return the model's answers to train on, and the held-out data: answers, or questions without answers.

    asked: all settings that the answers depend on, except the questions.
    """
    ask_held_out = entry.tested_on == "answers"
    every = [*held_out, *questions] if ask_held_out else questions
    asked["questions"] = _hash([(q.name, q.ids, q.max_new_tokens, q.reference) for q in every])[:16]
    with alone(out):
        traces = collect(loaded, every, file=AnswerFile(out / ANSWERS, asked), on_answer=on_answer)
    names = {q.name for q in held_out}
    items = [trace for trace in traces if trace.name not in names]
    test: Sequence[Question | Trace] = [t for t in traces if t.name in names] if ask_held_out else held_out
    if not items or not test:
        which = f"{len(questions)} questions" if not items else f"first {len(held_out)} questions (which are held out)"
        cure = "" if data is None else f"See its answers in {quote(out / ANSWERS)}. "
        raise UserError(
            f"the model answered none of the {which} rightly; there is nothing to learn. {cure}Give other questions "
            "with --data."
        )
    return items, test


def _questions(
    entry: Entry, loaded: LoadedModel, data: str | None, samples: int, seed: int, longest: int
) -> tuple[list[Question], list[Question]]:
    """Return `samples` questions to train on, and the questions that the recipe holds out."""
    check_least({"longest": longest}, longest=1)
    if data is None:
        asked = built_in(entry.tasks, samples, seed, loaded)
        return asked, built_in(entry.tasks, entry.held_out, seed, loaded, held_out=True)
    questions = prompts_of(data, loaded, longest)
    if len(questions) <= entry.held_out:
        raise UserError(
            f"--data has {len(questions)} questions that leave the model room to answer; more than {entry.held_out} "
            "are needed, because that many are held out. Add questions."
        )
    return questions[entry.held_out :][:samples], questions[: entry.held_out]


def _hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()
