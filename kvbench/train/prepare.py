"""From a recipe's name to one that is ready to run: the model is loaded and has answered its questions.

ready = prepare("lookaheadkv", "tiny", data=None, samples=1200, steps=1500, out=Path("runs/lookahead"), ...)
ready.recipe, ready.loaded
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.engine.model.load import LoadedModel, load
from kvbench.errors import UserError, show
from kvbench.sources import models
from kvbench.train.answers import AnswerFile
from kvbench.train.catalogue import RECIPES, Entry
from kvbench.train.head_data import Example, examples, source
from kvbench.train.lock import alone
from kvbench.train.processes import is_first, own_device
from kvbench.train.recipe import Recipe, Settings
from kvbench.train.traces import Question, Trace, built_in, collect, prompts_of

ANSWERS = "answers.jsonl"


@dataclass(frozen=True, slots=True)
class Ready:
    """A recipe with its model."""

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
    tick: Callable[[int], None] | None = None,
) -> Ready:
    """Load the model, let it answer, make the recipe.

    Args:
        data: a file with questions; None takes problems of the built-in tasks.
        samples: questions to ask, or examples to train on; the entry's `held_out` more are held out.
        out: the folder of the training, where answers are kept and found.
    """
    entry = RECIPES[name]
    loaded = load(models.describe(model).where, device=own_device(device), dtype=entry.dtype)
    revision = models.revision(models.describe(model))  # also of a model that loading has just fetched
    module, _, cls = entry.place.partition(":")
    make: Any = getattr(importlib.import_module(module), cls)  # a subclass of Recipe
    make.check(loaded, options)
    if entry.given != "examples" and not loaded.stop_ids:
        raise UserError(f"model {show(model)} has no end token, so its answers would never end; give it one.")
    about = Path(data).name if data else ", ".join(entry.tasks) or source(loaded)
    given: Sequence[Question | Trace | Example]
    test: Sequence[Question | Trace | Example]
    if entry.given == "examples":
        if data is not None:
            raise UserError(f"{name} is trained on texts of its own; it takes no --data.")
        made = examples(loaded, samples + entry.held_out, seed, int(options["tokens"]))
        given, test = made[:samples], made[samples:]
    else:
        longest = int(options["longest"])
        asked, kept_out = _questions(entry, loaded, data, samples, seed, longest)
        given, test = asked, kept_out
        if "questions" in (entry.given, entry.tested) and any(q.right is None for q in (*asked, *kept_out)):
            raise UserError(f"{name} needs to know what is right: give every line of --data a field 'answer'.")
        if entry.given == "answers":
            questions = asked if entry.tested == "questions" else [*kept_out, *asked]
            said = {
                "model": model,
                "revision": revision,
                "fingerprint": loaded.fingerprint,
                "data": about,
                "samples": samples,
                "held_out": entry.held_out,
                "seed": seed,
                "longest": longest,
                "questions": _hash([(q.name, q.ids, q.max_new_tokens, q.reference) for q in questions])[:16],
            }
            with alone(out) if is_first() else nullcontext():
                traces = collect(loaded, questions, file=AnswerFile(out / ANSWERS, said), tick=tick)
            tested = {q.name for q in kept_out}
            given = [trace for trace in traces if trace.name not in tested]
            test = kept_out if entry.tested == "questions" else [t for t in traces if t.name in tested]
            if not given or not test:
                which = f"{len(asked)} questions" if not given else f"first {len(kept_out)} questions, held out,"
                why = f"{show(out / ANSWERS)} has what it said." if data else "Give --data."
                raise UserError(f"the model answered none of the {which} rightly; there is nothing to learn. {why}")
    read = _hash([item.ids for item in (*given, *test)])
    more = dict(options) | {"data": about, "samples": samples, "data_sha256": read}
    settings = Settings(steps=steps, lr=lr, batch=batch, seed=seed, more=more)
    return Ready(make(loaded, settings, given, test), loaded, revision)


def _questions(
    entry: Entry, loaded: LoadedModel, data: str | None, samples: int, seed: int, longest: int
) -> tuple[list[Question], list[Question]]:
    """Those to train on, and those held out."""
    if longest < 1:
        raise UserError(f"--opt longest must be 1 or more; got {longest}.")
    if data is None:
        asked = built_in(entry.tasks, samples, seed, loaded)
        return asked, built_in(entry.tasks, entry.held_out, seed, loaded, held_out=True)
    questions = prompts_of(data, loaded, longest)
    if len(questions) <= entry.held_out:
        raise UserError(
            f"--data has {len(questions)} questions that leave the model room to answer; more than {entry.held_out} "
            "are needed, as that many are held out."
        )
    return questions[entry.held_out :][:samples], questions[: entry.held_out]


def _hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()
