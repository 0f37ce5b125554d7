"""The declaration of a recipe: defaults and presets of its settings. Imports no torch, because `--help` reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvbench.errors import UserError, quote
from kvbench.registry import did_you_mean
from kvbench.sources.models import TINY
from kvbench.train.collection import ASKING, DEFAULTS

COUNTS = ("samples", "steps", "lr", "batch")
PROMPTING: Mapping[str, Any] = {"thinking": None, "prompt_style": "plain", "system": None}  # `Prompting`
FLAGS = (*COUNTS, *PROMPTING)  # settings with their own command-line flags; --opt sets all others
SCHEDULES = ("cosine", "constant", "trapezoid")
# The optimiser's settings, which every recipe takes as --opt NAME=VALUE.
OPTIMISER: Mapping[str, Any] = {
    "schedule": "cosine",
    "warmup": 20,
    "floor": 0.1,
    "beta2": 0.98,
    "weight_decay": 0.0,
}
PRECISIONS = ("float32", "bfloat16")  # values of the option `precision`
# For recipes that train the model: an adapter's rank (0: no adapter, all weights are trained), scale and layers.
LORA: Mapping[str, Any] = {"lora": 0, "lora_alpha": 32.0, "lora_places": "all"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A named set of values that replace the defaults of settings.

    Attributes:
        about: one line that says what the values reproduce, and which values the sources do not state.
        values: the values by the setting's name (`Entry.defaults`).
        models: further values for some models, by the last part of the model's name, such as "Qwen3-4B".
    """

    about: str
    values: Mapping[str, Any]
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def names_model(self, model: str) -> bool:
        return _last(model) in map(str.lower, self.models)

    def of(self, model: str) -> dict[str, Any]:
        """Return the values for a model, by the setting's name."""
        own = (values for name, values in self.models.items() if name.lower() == _last(model))
        return {**self.values, **next(own, {})}


def _last(model: str) -> str:
    return Path(model).name.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One recipe of ``kvbench train``: its defaults and presets.

    Attributes:
        location: ``module:class`` of a built-in recipe; "" if the entry is an attribute of the registered class.
        about: one line for ``kvbench list recipes``.
        tasks: built-in tasks whose problems are the questions when the user gives no --data.
        traces, held_out: how many questions or examples to train on, and how many to hold out.
        learns_from: what the recipe trains on: answers to the questions (from the data or by the model), the questions
            alone, or examples with answers (`kvbench.train.head_data`).
        tested_on: what the held-out figures use, if the recipe learns from answers. "answers": answers to the held-out
            questions, collected before the training. "questions": the questions; the recipe lets the model answer them
            for each figure.
        dtype: number type of the loaded model; a recipe with the option `precision` ignores it.
        options: the recipe's own settings and their defaults. A recipe that learns from answers also has the settings
            of `kvbench.train.collection`. A recipe that learns from questions has only two of those settings,
            max_tokens and max_prompt. `options` may also change the defaults of those settings.
        presets: the presets by name; the built-in model gets "tiny" if the user names no preset.
    """

    location: str = ""
    about: str
    tasks: tuple[str, ...] = ()
    traces: int
    steps: int
    lr: float
    held_out: int = 32
    batch: int = 8
    learns_from: Literal["answers", "questions", "examples"] = "answers"
    tested_on: Literal["answers", "questions"] = "answers"
    dtype: Literal["auto", "float32"] = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    presets: Mapping[str, Preset] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = self.defaults()
        for name, preset in self.presets.items():
            for setting in {s for values in (preset.values, *preset.models.values()) for s in values} - known.keys():
                raise UserError(f"preset {quote(name)} of a recipe sets {quote(setting)}, which the recipe lacks.")

    def defaults(self) -> dict[str, Any]:
        """Return the defaults of all settings that the recipe has, by name: those of training, prompts and so on."""
        counts = dict(zip(COUNTS, (self.traces, self.steps, self.lr, self.batch)))
        asking = {} if self.learns_from == "examples" else {**PROMPTING, **ASKING}
        collecting = DEFAULTS if self.learns_from == "answers" else {}
        return {**counts, **asking, **OPTIMISER, **collecting, **self.options}

    def dtype_for(self, options: Mapping[str, Any]) -> str:
        """Return the number type in which to load the model. options: the recipe's settings by name. Raises UserError
        if the option `precision` is invalid."""
        check_choices(options, precision=PRECISIONS)
        return str(options.get("precision", self.dtype))

    def preset_for(self, model: str, preset: str | None) -> str | None:
        """Return the name of the preset that a training uses; None if it uses none. preset: the user's choice, if any.
        Raises UserError if the recipe lacks the preset."""
        if preset is None:
            return TINY if model == TINY and TINY in self.presets else None
        if preset not in self.presets:
            names = list(self.presets)
            there = f"There are {', '.join(names)}" if names else "It has none"
            raise UserError(f"the recipe has no preset {quote(preset)}.{did_you_mean(preset, names)} {there}.")
        return preset

    def settings(self, model: str, preset: str | None = None) -> dict[str, Any]:
        """Return the value of every setting for a model, by name, before the user changes any."""
        name = self.preset_for(model, preset)
        return self.defaults() | (self.presets[name].of(model) if name else {})


def check_optimiser(settings: Mapping[str, Any]) -> None:
    """Raise UserError if a setting of the optimiser is invalid."""
    check_choices(settings, schedule=SCHEDULES)
    check_least(settings, warmup=0, beta2=0, weight_decay=0)
    if not 0 <= settings["floor"] <= 1:
        raise UserError(f"--opt floor must lie between 0 and 1; got {settings['floor']:g}.")
    if settings["beta2"] >= 1:
        raise UserError(f"--opt beta2 must be below 1; got {settings['beta2']:g}.")


def check_least(more: Mapping[str, Any], **least: float) -> None:
    """Raise UserError if a setting in `more` is below its least value in `least`; other settings are not checked."""
    for name, smallest in least.items():
        if (value := more.get(name, smallest)) < smallest:
            raise UserError(f"--opt {name} must be {smallest} or more; got {value:g}.")


def check_choices(more: Mapping[str, Any], **choices: Sequence[str]) -> None:
    """Raise UserError if a setting in `more` has a value that `choices` does not list for it. Settings that `choices`
    does not name are not checked."""
    for name, known in choices.items():
        if (value := more.get(name, known[0])) not in known:
            need = " or ".join(known) if len(known) < 3 else f"one of {', '.join(known)}"
            raise UserError(f"--opt {name} must be {need}; got {quote(value)}.")
