"""Calls two methods of a cache: one before and one after each forward pass that a model runs with this cache."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable
from typing import Any, Protocol


class HookedCache(Protocol):
    """A cache with methods that run before and after each forward pass that uses it."""

    def enter(self, inputs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Called before a pass with its inputs; returns the positional and named inputs that the pass gets instead."""

    def leave(self, inputs: dict[str, Any]) -> None:
        """Called after a pass, also if the pass failed."""


def hook(model: Any, cache: HookedCache) -> Callable[[], None]:
    """Call `cache.enter` before and `cache.leave` after each forward pass of the model with `past_key_values=cache`.

    Returns the function that removes the hooks. The hooks hold the cache by a weak reference, and are removed when the
    cache is deleted.
    """
    mine, hooks = weakref.ref(cache), contextlib.ExitStack()

    def enter(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = _named(model, args, kwargs)
        used = _used(mine, inputs)
        return None if used is None else used.enter(inputs)

    def leave(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        inputs = _named(model, args, kwargs)
        if (used := _used(mine, inputs)) is not None:  # a cache without layers is false
            used.leave(inputs)

    hooks.callback(model.register_forward_pre_hook(enter, with_kwargs=True).remove)
    hooks.callback(model.register_forward_hook(leave, with_kwargs=True, always_call=True).remove)
    return weakref.finalize(cache, hooks.close)


def _named(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all inputs of a forward pass by name."""
    return {**dict(zip(inspect.signature(model.forward).parameters, args)), **kwargs} if args else kwargs


def _used(mine: weakref.ref[HookedCache], inputs: dict[str, Any]) -> HookedCache | None:
    """Return the cache if a forward pass with these inputs uses it, otherwise None."""
    cache = mine()
    return cache if inputs.get("past_key_values") is cache else None
