"""Sets up a recipe for training: loads the model, and collects questions or examples.

If the recipe learns from answers, the model answers the questions for which the data give no answer
(`Question.given`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.config.plugins import hash_of
from kvbench.engine.model.load import LoadedModel, load, refuse_training
from kvbench.engine.model.weights import find, load_weights, read_card
from kvbench.errors import UserError, counted, quote
from kvbench.eviction.api import Weights
from kvbench.sources import models
from kvbench.train.answers import SharedAnswers
from kvbench.train.catalogue import entry_of, recipe_class
from kvbench.train.collection import CHOICES, Collection
from kvbench.train.data_file import parsed_rows, read_questions
from kvbench.train.data_place import locate
from kvbench.train.entry import Entry
from kvbench.train.head_data import Example, examples, source
from kvbench.train.lock import alone
from kvbench.train.processes import joined, own_device
from kvbench.train.prompting import Prompting
from kvbench.train.recipe import Recipe, Settings, check_choices
from kvbench.train.traces import Question, Trace, built_in, collect

ANSWERS = "answers.jsonl"
NOT_KNOWN = "without a right answer"  # why a row of --data is left out


@dataclass(frozen=True, slots=True)
class Ready:
    """A recipe that is ready to train and has its data; the loaded model with the revision of its files; and notes to
    the user on the data."""

    recipe: Recipe
    loaded: LoadedModel
    revision: str | None
    notes: list[str]


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
    prompting: Prompting | None = None,
    continue_from: str | None = None,
    on_answer: Callable[[int], None] | None = None,
) -> Ready:
    """Load the model, collect the data, and return the recipe called `name`, ready to train.

    Args:
        data: a file, folder or data set on the hub with questions or texts (`kvbench.train.data_place`). None: problems
            of the built-in tasks, or the recipe's own texts if it learns from examples.
        samples: the most questions or examples to train on, without those that the recipe holds out.
        out: the folder of the training, in which the answers are stored.
        prompting: how questions become prompts.
        continue_from: a weights file of a finished training, or its folder; these weights are the initial values.
        on_answer: called with the number of answers so far.
    """
    entry, prompting = entry_of(name), prompting or Prompting()
    with joined() as processes:
        processes.share(batch)  # refuse a batch that they cannot share before the model answers questions
    check_choices(options, **CHOICES)
    collection = Collection.of(options)
    make = recipe_class(name)
    first, first_sha256 = _first_weights(make, continue_from) if continue_from is not None else (None, None)
    place = locate(data) if data is not None else None
    if place is not None:
        next(parsed_rows(place.path, prompting), None)  # report a wrong file before loading the model
    info = models.describe(model)
    loaded = load(info.where, device=own_device(device), dtype=entry.dtype_for(options))
    refuse_training(loaded)
    revision = models.revision(models.describe(model))  # describe again: loading may have downloaded the model
    make.check(loaded, options)
    # Raises SetupError if the weights were made for another model.
    initial = load_weights(first, None, loaded.model.config, loaded.device, loaded.fingerprint) if first else None
    about = place.name if place is not None else ", ".join(entry.tasks) or source(loaded)
    notes: list[str] = []
    left_out: Counter[str] = Counter()
    items: Sequence[Question | Trace | Example]
    test: Sequence[Question | Trace | Example]
    if entry.learns_from == "examples":
        if place is not None or prompting.settings():
            raise UserError(
                f"{name} makes its own training texts; leave out --data, --thinking, --no-thinking, --prompt-style and "
                "--system."
            )
        drawn = examples(loaded, samples + entry.held_out, seed, int(options["tokens"]))
        items, test = drawn[:samples], drawn[samples:]
    else:
        questions, held_out = _questions(
            entry, loaded, place.path if place else None, samples, seed, collection, prompting, left_out
        )
        notes += [f"{rows}." for rows in _rows(left_out)]
        for question in (*questions, *held_out):
            loaded.check_ids(f"question {quote(question.name)}", (*question.ids, *(question.given or ())))
        items, test = questions, held_out
        asks = "questions" in (entry.learns_from, entry.tested_on)
        if not loaded.stop_ids and (asks or any(q.given is None for q in (*questions, *held_out))):
            raise UserError(
                f"model {quote(model)} has no end token, so its answers would never end; add eos_token_id to "
                "generation_config.json."
            )
        if asks:
            own = (*questions, *held_out) if entry.learns_from == "questions" else held_out
            make.check_longest(loaded, options, max(len(q.ids) + q.max_new_tokens for q in own))
        if entry.learns_from == "answers":
            asked: dict[str, Any] = {"model": model, "revision": revision, "fingerprint": loaded.fingerprint}
            asked["data"], asked["dtype"] = about, str(loaded.dtype).removeprefix("torch.")
            asked |= {"samples": samples, "held_out": entry.held_out, "seed": seed}
            asked |= collection.asked() | prompting.asked()
            items, test, dropped = _answered(entry, loaded, questions, held_out, collection, asked, out, on_answer)
            notes += dropped
    data_hash = _hash([_identity(item) for item in (*items, *test)])
    more = dict(options) | {"data": about, "samples": samples, "data_sha256": data_hash} | prompting.asked()
    more["dtype"] = str(loaded.dtype).removeprefix("torch.")  # "auto" differs between machines
    if (plugin := hash_of(name, "recipe")) is not None:  # another version of the plug-in may train differently
        more["plugin_sha256"] = plugin
    if first_sha256 is not None:
        more["continue_from_sha256"] = first_sha256
    settings = Settings.of(more, steps=steps, lr=lr, batch=batch, seed=seed)
    recipe = make(loaded, settings, items, test)
    if initial is not None:
        recipe.continue_from(initial)
    return Ready(recipe, loaded, revision, notes + recipe.about_data())


def _first_weights(recipe: type[Recipe], place: str) -> tuple[Weights, str]:
    """Return where the weights of a finished training are, and the hash on their card. place: their file or its folder.

    Raises UserError for a recipe that cannot start from such weights, SetupError if the file or its card is missing or
    damaged.
    """
    recipe.check_origin(place)
    weights = Weights(kind=recipe.kind, path=place, recipe=recipe.name)
    return weights, str(read_card(find(weights, None)).get("sha256"))


def _answered(
    entry: Entry,
    loaded: LoadedModel,
    questions: list[Question],
    held_out: list[Question],
    collection: Collection,
    asked: dict[str, Any],
    out: Path,
    on_answer: Callable[[int], None] | None,
) -> tuple[list[Trace], Sequence[Question | Trace], list[str]]:
    """Let the model answer the questions that have no given answer; return the usable answers to train on, the
    held-out data, and a note on the dropped answers, if there are any.

    The held-out data are answers or, if the recipe is tested on questions, the questions themselves, which are not
    answered here. asked: all settings that the answers depend on, except the questions. Raises UserError if no answer
    to train on, or no held-out answer, is usable.
    """
    ask_held_out = entry.tested_on == "answers"
    every = [*held_out, *questions] if ask_held_out else questions
    generated = [(q.name, q.ids, q.max_new_tokens, q.reference) for q in every if q.given is None]
    asked["questions"] = _hash(generated)[:16]
    dropped: Counter[str] = Counter()
    with joined() as processes, alone(out):
        traces = collect(
            loaded,
            every,
            collection,
            seed=asked["seed"],
            file=SharedAnswers(out / ANSWERS, asked, processes),
            processes=processes,
            on_answer=on_answer,
            on_drop=lambda why: dropped.update([why]),
        )
    names = {q.name for q in held_out}
    items = [trace for trace in traces if trace.name not in names]
    test: Sequence[Question | Trace] = [t for t in traces if t.name in names] if ask_held_out else held_out
    reasons = _reasons(dropped)
    if not items or not test:
        asked_for, role = (questions, "training") if not items else (held_out, "held-out")
        too = ", also of the held-out questions" if ask_held_out else ""
        where = f" See the answers in {quote(out / ANSWERS)}." if generated else ""
        raise UserError(
            f"no answer to the {counted(len(asked_for), f'{role} question')} is usable. Dropped answers{too}: "
            f"{reasons}.{where} Give other questions with --data, or other settings with --opt."
        )
    used = f"{len(traces)} of {len(traces) + dropped.total()} answers are used; dropped: {reasons}."
    return items, test, [used] if dropped else []


def _questions(
    entry: Entry,
    loaded: LoadedModel,
    data: Path | None,
    samples: int,
    seed: int,
    collection: Collection,
    prompting: Prompting,
    left_out: Counter[str],
) -> tuple[list[Question], list[Question]]:
    """Return at most `samples` questions to train on, and the questions that the recipe holds out. left_out: counts, by
    reason, the rows of the data file that are read but not used as questions; this function adds to the counts."""
    if data is None:
        if given := list(prompting.settings()):
            flag = "--no-thinking" if prompting.thinking is False else f"--{given[0].replace('_', '-')}"
            raise UserError(f"{flag} needs --data: problems of built-in tasks are asked without a chat template.")
        asked = built_in(entry.tasks, samples, seed, loaded)
        return asked, built_in(entry.tasks, entry.held_out, seed, loaded, held_out=True)
    questions = read_questions(data, loaded, collection, prompting, lambda why: left_out.update([why]))
    return _divide(entry, questions, samples, left_out)


def _divide(
    entry: Entry, questions: Iterable[Question], samples: int, left_out: Counter[str]
) -> tuple[list[Question], list[Question]]:
    """Divide the questions of a data file: hold out the first ones, and return at most `samples` others for training.

    Some recipes need right answers. Such a recipe holds out only questions whose right answer is known. It can still
    train on other questions if it learns from answers and the data file gives an answer (`Question.given`). left_out:
    as in `_questions`. Raises UserError if too few questions remain.
    """
    judged, own = "questions" in (entry.learns_from, entry.tested_on), entry.learns_from == "answers"
    held_out, taken, seen = list[Question](), list[Question](), 0
    for question in questions:
        fits = not judged or question.judge is not None
        seen += 1
        if fits and len(held_out) < entry.held_out:
            held_out.append(question)
        elif not fits and not (own and question.given is not None):
            left_out[NOT_KNOWN] += 1
        elif len(taken) < samples:
            taken.append(question)
        if len(taken) == samples and len(held_out) == entry.held_out:
            break
    why = "".join(f"; {rows}" for rows in _rows(left_out))
    if judged and seen and not held_out:
        raise UserError(
            "this recipe needs right answers; no usable row of --data has one in a column 'answer', or in a \\boxed{} "
            f"of a column 'solution'{why}."
        )
    if not taken or len(held_out) < entry.held_out:
        raise UserError(
            f"too few questions or texts in --data fit the model and this recipe: {len(held_out)} to hold out (needed: "
            f"{entry.held_out}), {len(taken)} to train on (needed: 1 or more){why}. Add questions, with right answers "
            "if the recipe needs them."
        )
    return taken, held_out


def _rows(left_out: Counter[str]) -> list[str]:
    """Return, in a list, text with the number of rows that are left out and the reasons; [] if there are none."""
    rows = f"left out: {counted(left_out.total(), 'row')} of --data ({_reasons(left_out)})"
    return [rows] if left_out else []


def _reasons(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {why}" for why, count in counts.items())


def _identity(item: Any) -> object:
    """Return the parts of an item that matter for a training: the item's ids and, if it is known, the right answer."""
    reference = getattr(item, "reference", None)
    return item.ids if reference is None else (item.ids, reference)


def _hash(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()
