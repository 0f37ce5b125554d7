"""Compares a run's budgets and intervals with those on the cards of its methods' weights.

A method whose weights were trained at one budget and interval may score lower at another; the run warns once per
method and file of weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvbench.config.run_config import MethodChoice, RunConfig
from kvbench.engine.model.weights import card_path, find, read_card
from kvbench.errors import bare, quote
from kvbench.eviction.api import Method
from kvbench.sources.models import ModelInfo

COMPARED = ("budget", "interval")


def warnings(config: RunConfig, methods: Mapping[MethodChoice, Method], info: ModelInfo) -> Iterator[str]:
    """Yield a warning for each method that runs at another budget or interval than its weights were trained for.

    A value that the card of the weights lacks is not compared. A budget that is a share of the prompt is not compared
    either, because its number of entries varies. Variants of a method with the same weights share one warning. Raises
    KVBenchError if weights or their card are missing, or if a card is damaged.
    """
    variants: dict[tuple[str, Path], list[MethodChoice]] = {}
    for choice, method in methods.items():
        if (needed := method.weights()) is not None:
            variants.setdefault((choice.name, find(needed, info.folder, info.name)), []).append(choice)
    for (name, path), choices in variants.items():
        cells = [cell for cell in config.cells() if cell.method in choices]
        here: list[dict[str, Any]] = [
            {"budget": cell.budget if isinstance(cell.budget, int) else None, "interval": config.interval_of(cell)}
            for cell in cells
        ]
        trained = _trained(read_card(path))
        if not all(any(_matches(values, one) for one in trained) for values in here):
            at = " or ".join(", ".join(f"{name} {bare(value)}" for name, value in one.items()) for one in trained)
            values_here = {name: {values[name] for values in here} - {None} for name in trained[0]}
            run = ", ".join(f"{name} {_listed(values)}" for name, values in values_here.items() if values)
            yield (
                f"method {quote(name)}: its weights were trained for {at} ({quote(card_path(path))}); "
                f"this run has {run}, at which the method may score lower."
            )


def _trained(card: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a list with the budget and interval that a card states, as a dictionary {name: value}. If the training had
    another budget and interval for long texts (the option `long` of `foresightkv`), the list has a second dictionary
    with these. A value that the card lacks is left out. A card without `trained_at`, from an earlier kvbench, states
    the values among the settings of its training."""
    made: Any = card.get("made")
    stated: Any = made.get("trained_at") if isinstance(made, Mapping) else None
    if stated is None:
        stated = made
        for name in ("settings", "more"):
            stated = stated.get(name) if isinstance(stated, Mapping) else None
    if not isinstance(stated, Mapping):
        return [{}]
    kinds = ("", "long_") if stated.get("long") else ("",)
    return [{name: stated[kind + name] for name in COMPARED if kind + name in stated} for kind in kinds]


def _matches(here: Mapping[str, Any], trained: Mapping[str, Any]) -> bool:
    """Return whether a cell's budget and interval (None: not compared) are those of a training."""
    return all(here[name] in (None, value) for name, value in trained.items())


def _listed(values: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(values)))
