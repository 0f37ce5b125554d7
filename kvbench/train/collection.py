"""The settings by which a training collects answers. Each setting is an option that means the same in every recipe.

`Collection` has the defaults; the catalogue overrides a default where a recipe needs another value. Imports no torch,
because `--help` reads the catalogue.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kvbench.errors import UserError
from kvbench.eviction.options import OptionError, check_values, option
from kvbench.records import Sampling

Keep = Literal["keep", "drop"]
Source = Literal["data", "model"]
CHOICES = {"unfinished": get_args(Keep), "wrong": get_args(Keep), "answers": get_args(Source)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """How the model answers the questions of a training, and which answers the training uses, whole or in part.

    The settings act in this order:
        max_prompt: skips questions with longer prompts, and cuts longer raw texts that the model is to continue.
        answers: "data": training uses the answers in the data, and the model answers only the questions that have none;
            "model": the model answers all questions.
        temperature, top_p, top_k, max_tokens: how the model generates its answers.
        wrong, unfinished, min_tokens: which answers training drops.
        truncate: how many tokens training uses from the beginning of each remaining answer.
    """

    temperature: float = option(0.0, "temperature of the answers; 0 is greedy", low=0)
    top_p: float = option(1.0, "draw from the smallest set of tokens with this total probability", above=0, high=1)
    top_k: int = option(0, "number of most probable tokens to draw from; 0 is off", low=0)
    max_tokens: int = option(4096, "most tokens of an answer to a question from --data", low=1)
    max_prompt: int = option(
        0,
        "most tokens of a prompt: longer prompts are skipped, longer raw texts that the model is to continue are cut; "
        "0: as many as leave room for an answer",
        low=0,
    )
    min_tokens: int = option(0, "drop answers with fewer tokens", low=0)
    truncate: int = option(0, "train on this many first tokens of an answer; 0: all", low=0)
    unfinished: Keep = "keep"  # keep or drop answers that reach max_tokens or the context's end without an end token
    wrong: Keep = "drop"  # keep or drop wrong answers to questions whose right answer is known
    answers: Source = "data"  # data: train on the answers and texts in --data; model: train on answers of the model

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Collection:
        """Take these settings from a recipe's options; a setting that the options lack has its default.

        Raises UserError if a setting is invalid. The caller checks `unfinished`, `wrong` and `answers` against their
        possible values (`CHOICES`).
        """
        names = {field.name for field in dataclasses.fields(cls)}
        made = cls(**{name: value for name, value in options.items() if name in names})
        try:
            check_values(made)
        except OptionError as error:
            raise UserError(f"--opt {error.name} {error.reason}") from None
        if made.min_tokens > made.max_tokens:
            raise UserError(
                f"--opt min_tokens {made.min_tokens} is above max_tokens {made.max_tokens}, so every answer would be "
                "dropped; lower min_tokens or raise max_tokens."
            )
        return made

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)

    def asked(self) -> dict[str, Any]:
        """Return the settings on which the model's answers to given prompts depend. Of the other settings, `max_prompt`
        selects or cuts prompts; the rest select or cut answers."""
        return {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "max_tokens")}


DEFAULTS: dict[str, Any] = dataclasses.asdict(Collection())
ASKING = {name: DEFAULTS[name] for name in ("max_tokens", "max_prompt")}  # for recipes that collect no answers
