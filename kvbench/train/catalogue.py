"""What ``kvbench train`` can train, with the defaults of each. No torch: `--help` reads it.

RECIPES["lookaheadkv"].settings(steps=200)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One recipe.

    Attributes:
        place: ``module:class`` of its `Recipe`.
        about: one line.
        tasks: built-in tasks whose problems are asked when no --data is given.
        given: what the recipe trains on: the model's own answers to the questions, or the questions themselves.
        traces, held_out: how many of them to train on and to hold out.
        steps, lr, batch: defaults of the loop.
        options: the recipe's own settings, with their defaults.
    """

    place: str
    about: str
    tasks: tuple[str, ...]
    traces: int
    held_out: int
    steps: int
    lr: float
    batch: int
    given: Literal["answers", "questions"] = "answers"
    options: Mapping[str, Any] = field(default_factory=dict)


RECIPES: dict[str, Entry] = {
    "lookaheadkv": Entry(
        place="kvbench.train.lookaheadkv:LookaheadRecipe",
        about="learned rows and adapter that foresee what an answer attends to",
        tasks=("lookup", "lookup/lookup-1", "chain", "walk"),
        traces=1200,
        held_out=32,
        steps=1500,
        lr=5e-3,
        batch=8,
        options={"rows": 16, "rank": 16, "alpha": 32.0, "budget": 64},
    ),
}
TABLES = {"headkv": "importance of every query head", "duo": "how far every KV head looks"}
