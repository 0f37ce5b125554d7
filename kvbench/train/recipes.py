"""From a recipe's name to one that is ready to run: the model is loaded and has answered its questions.

ready = prepare("lookaheadkv", "tiny", data=None, samples=1200, steps=1500, ...)
ready.recipe, ready.loaded
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench import models
from kvbench.engine.model import LoadedModel, load
from kvbench.errors import UserError
from kvbench.train.catalogue import RECIPES, Entry
from kvbench.train.head_data import Example, examples, source
from kvbench.train.processes import own_device
from kvbench.train.recipe import Recipe, Settings
from kvbench.train.traces import Question, Trace, built_in, collect, prompts_of

LONGEST_ANSWER = 512  # tokens, to questions of a file, unless a recipe has an option `longest`


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
    tick: Callable[[int], None] | None = None,
) -> Ready:
    """Load the model, let it answer, make the recipe.

    Args:
        data: a file with questions; None takes problems of the built-in tasks.
        samples: answers, questions or examples to train on; the entry's `held_out` more are held out.
    """
    entry = RECIPES[name]
    info = models.describe(model)
    loaded = load(str(info.folder or model), device=own_device(device))
    given: Sequence[Question | Trace | Example]
    test: Sequence[Question | Trace | Example]
    if entry.given == "examples":
        if data is not None:
            raise UserError(f"{name} is trained on texts of its own; it takes no --data.")
        made = examples(loaded, samples + entry.held_out, seed, int(options["tokens"]))
        given, test = made[:samples], made[samples:]
    else:
        asked, kept_out = _questions(entry, loaded, data, samples, seed, int(options.get("longest", LONGEST_ANSWER)))
        given, test = asked, kept_out
        if "questions" in (entry.given, entry.tested) and any(q.right is None for q in (*asked, *kept_out)):
            raise UserError(f"{name} needs to know what is right: give every line of --data a field 'answer'.")
        if entry.given == "answers":
            given = collect(loaded, asked, tick=tick)
            test = kept_out if entry.tested == "questions" else collect(loaded, kept_out)
            if not given or not test:
                which = "questions" if not given else f"first {len(kept_out)} questions, which are held out,"
                why = "Without the field 'answer' every answer counts as right." if data else "Give --data."
                raise UserError(f"the model answered none of the {which} rightly; there is nothing to learn. {why}")
    read = hashlib.sha256(repr([item.ids for item in (*given, *test)]).encode()).hexdigest()
    about = Path(data).name if data else ", ".join(entry.tasks) or source(loaded)
    more = dict(options) | {"data": about, "samples": samples, "data_sha256": read}
    settings = Settings(steps=steps, lr=lr, batch=batch, seed=seed, more=more)
    module, _, cls = entry.place.partition(":")
    recipe: Recipe = getattr(importlib.import_module(module), cls)(loaded, settings, given, test)
    return Ready(recipe, loaded, models.revision(info))


def _questions(
    entry: Entry, loaded: LoadedModel, data: str | None, samples: int, seed: int, longest: int
) -> tuple[list[Question], list[Question]]:
    """Those to train on, and those held out."""
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
