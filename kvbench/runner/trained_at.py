"""Compares a run's budgets and intervals with those on the cards of its methods' weights.

A method whose weights were trained at one budget and interval may score lower at another; the run warns once per
method and file of weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.config.run_config import MethodChoice, RunConfig
from kvbench.engine.model.weights import card_path, find, read_card
from kvbench.errors import bare, quote
from kvbench.eviction.api import Method
from kvbench.sources.models import ModelInfo


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
        here: dict[str, Sequence[Any]] = {
            "budget": [cell.budget for cell in cells if isinstance(cell.budget, int)],
            "interval": [config.interval_of(cell) for cell in cells],
        }
        trained = _trained(read_card(path))
        if any(set(here[name]) - {value} for name, value in trained.items()):
            at = ", ".join(f"{name} {bare(value)}" for name, value in trained.items())
            run = ", ".join(f"{name} {_listed(here[name])}" for name in trained if here[name])
            yield (
                f"method {quote(name)}: its weights were trained for {at} ({quote(card_path(path))}); "
                f"this run has {run}, at which the method may score lower."
            )


def _trained(card: Mapping[str, Any]) -> dict[str, Any]:
    """Return the budget and the interval that a card states, by name; a value that the card lacks is left out."""
    options: Any = card
    for name in ("made", "settings", "more"):
        options = options.get(name) if isinstance(options, Mapping) else None
    return {name: options[name] for name in ("budget", "interval") if name in options} if options else {}


def _listed(values: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(set(values))))
