"""Calls two methods of a cache: one before and one after each forward pass that a model runs with this cache."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbench.integrations.transformers_cache import EvictionCache


def hook(model: Any, cache: EvictionCache) -> Callable[[], None]:
    """Let each forward pass of the model with `past_key_values=cache` call `cache.enter` first and `cache.leave` last.
    `enter` gets all inputs by name, and returns the positional and named inputs that the pass gets instead. `leave`
    gets the result of the pass; after a pass that failed, None.

    Returns the function that removes the hooks. The hooks hold the cache by a weak reference, and are removed when the
    cache is deleted.
    """
    mine, hooks = weakref.ref(cache), contextlib.ExitStack()

    def enter(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = _named(model, args, kwargs)
        held = mine()  # compared with None below: a cache without layers is false
        return held.enter(inputs) if held is not None and _uses(inputs, held) else None

    def leave(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        held = mine()  # compared with None below: a cache without layers is false
        if held is not None and _uses(_named(model, args, kwargs), held):
            held.leave(out)

    hooks.callback(model.register_forward_pre_hook(enter, with_kwargs=True).remove)
    hooks.callback(model.register_forward_hook(leave, with_kwargs=True, always_call=True).remove)
    return weakref.finalize(cache, hooks.close)


def _named(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all inputs of a forward pass by name."""
    return {**dict(zip(inspect.signature(model.forward).parameters, args)), **kwargs} if args else kwargs


def _uses(inputs: dict[str, Any], cache: EvictionCache) -> bool:
    return inputs.get("past_key_values") is cache
