"""From a recipe's name to one that is ready to run: the model is loaded and has answered its questions.

ready = prepare("lookaheadkv", "tiny", data=None, samples=1200, steps=1500, ...)
ready.recipe, ready.loaded
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench import models
from kvbench.engine.model import LoadedModel, load
from kvbench.errors import UserError
from kvbench.train.catalogue import RECIPES
from kvbench.train.recipe import Recipe, Settings
from kvbench.train.traces import Question, Trace, built_in, collect, prompts_of

LONGEST_ANSWER = 512  # tokens, to questions of a file


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
        samples: answers or questions to train on; the entry's `held_out` more are held out.
    """
    entry = RECIPES[name]
    info = models.describe(model)
    loaded = load(str(info.folder or model), device=device)
    if data is None:
        asked = built_in(entry.tasks, samples, seed, loaded)
        kept_out = built_in(entry.tasks, entry.held_out, seed, loaded, held_out=True)
    else:
        questions = prompts_of(data, loaded, LONGEST_ANSWER)
        if len(questions) <= entry.held_out:
            raise UserError(f"--data has {len(questions)} questions that fit; more than {entry.held_out} are needed.")
        asked, kept_out = questions[entry.held_out :][:samples], questions[: entry.held_out]
    given: Sequence[Question] | Sequence[Trace] = asked
    test: Sequence[Question] | Sequence[Trace] = kept_out
    if entry.given == "answers":
        given, test = collect(loaded, asked, tick=tick), collect(loaded, kept_out)
    read = hashlib.sha256(repr([item.ids for item in (*given, *test)]).encode()).hexdigest()
    more = dict(options) | {"data": data or ", ".join(entry.tasks), "samples": samples, "data_sha256": read}
    settings = Settings(steps=steps, lr=lr, batch=batch, seed=seed, more=more)
    module, _, cls = entry.place.partition(":")
    made: Recipe = getattr(importlib.import_module(module), cls)(loaded, settings, given, test)
    return Ready(made, loaded, models.revision(info))
