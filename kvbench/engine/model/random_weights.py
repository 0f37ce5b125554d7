"""Random weights and tables for methods that need trained ones, for measuring speed and checking invariants."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvbench.engine.adapter import fit_adapter
from kvbench.engine.model.load import LoadedModel
from kvbench.engine.model.weights import TABLES, Base, find, model_fields, model_sizes, save_weights
from kvbench.errors import KVBenchError, UserError, quote
from kvbench.eviction.api import Method, Weights
from kvbench.eviction.combined import Combined
from kvbench.eviction.learned import LearnedWeights


def supply(method: Method, loaded: LoadedModel, scratch: Path) -> tuple[Method, LoadedModel]:
    """Return the method, with the path of its weights or table set as an option, and the model.

    If the model's folder has no such weights or table, the function writes them with random numbers to a folder under
    `scratch`, unless an earlier call has written them. The returned model then has this folder as its own. A method
    that needs no weights or table, or whose option already has a path, is returned unchanged. Raises UserError for
    weights of unknown shapes.
    """
    weights = method.weights()
    if weights is None or weights.path != "auto":
        return method, loaded
    try:
        path = find(weights, loaded.folder)
    except KVBenchError:
        path = _drawn(weights, loaded.model, scratch)
        loaded = dataclasses.replace(loaded, folder=path.parent)
    option = weights.option if isinstance(weights, LearnedWeights) else "table"
    return filled(method, option, "auto", lambda: str(path)), loaded


def _drawn(weights: Weights, model: Any, scratch: Path) -> Path:
    """Return the path of a file with random weights; write the file if it does not exist yet."""
    tensors = draw(weights, model)
    sizes = repr([(name, list(tensor.shape)) for name, tensor in tensors.items()])
    folder = scratch / f"drawn-{hashlib.sha256(sizes.encode()).hexdigest()[:16]}"
    folder.mkdir(exist_ok=True)
    path = folder / f"{weights.kind}.safetensors"
    if not path.exists():
        save_weights(path, weights.kind, tensors, Base(name="random", config=model.config), made={"how": "random"})
    return path


def draw(weights: Weights, model: Any) -> dict[str, torch.Tensor]:
    """Return random tensors of the shapes that a method's weights or table have for a model, see `shapes_of`."""
    shapes, generator = shapes_of(weights, model), torch.Generator().manual_seed(0)
    if isinstance(weights, LearnedWeights):
        return {n: torch.randn(shape, generator=generator) * 2 / shape[-1] ** 0.5 for n, shape in shapes.items()}
    return {name: torch.rand(shape, generator=generator) ** 4 for name, shape in shapes.items()}


def shapes_of(weights: Weights, model: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes that a method's weights or table have for a model, by tensor name. Raises UserError for a kind
    of weights whose shapes are unknown."""
    ours = model_fields(model.config)
    if isinstance(weights, LearnedWeights):
        return fit_adapter(weights.shapes(model_sizes(model.config)), model)
    if weights.kind not in TABLES:
        raise UserError(
            f"there are no weights {quote(weights.kind)} for this model, and kvbench cannot draw random ones, because "
            f"it does not know their shapes. Put {weights.kind}.safetensors beside the model's weights."
        )
    return {name: tuple(ours[field] for field in fields) for name, fields in TABLES[weights.kind].items()}


def filled(method: Method, name: str, empty: Any, value: Callable[[], str]) -> Method:
    """Return the method with its option `name` set to `value()` if the option's value is `empty`. In a combined method,
    each part whose option `name` has the value `empty` gets `value()`."""
    if isinstance(method, Combined):
        first, second = (filled(part, name, empty, value) for part in (method.first, method.second))
        return dataclasses.replace(method, first=first, second=second)
    if any(f.name == name and getattr(method, name) == empty for f in dataclasses.fields(method)):
        return dataclasses.replace(method, **{name: value()})
    return method
