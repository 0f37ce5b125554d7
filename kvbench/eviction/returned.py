"""Checks the tensors that the functions of a method return, by name and shape alone: the host never waits for the
device.

Without these checks, a tensor of a wrong shape would be broadcast, and sequences would get each other's values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvbench.errors import PluginError, quote
from kvbench.eviction.columns import GivenColumn, expanded
from kvbench.eviction.declare import ScoreOut
from kvbench.lazy import torch

if TYPE_CHECKING:
    from kvbench.eviction.api import Allocation, Method
    from kvbench.eviction.new_tokens import NewTokens
    from kvbench.eviction.view import LayerView


def observed(method: Method, view: LayerView) -> dict[str, torch.Tensor]:
    """Return the new values of columns and states that the method observes. Raises PluginError for a value whose name
    or shape is wrong."""
    values = method.observe(view)
    _check_values(method, "observe", values, view)
    return values


def scored(method: Method, function: str, out: torch.Tensor | ScoreOut, view: LayerView) -> ScoreOut:
    """Return the method's scores of one layer. Raises PluginError if the scores, or new values of columns and states,
    have a wrong name or shape. function: the function that returned `out`."""
    result = ScoreOut.of(out)
    if _shape(result.score) != view.positions.shape:
        raise _wrong(method, function, "", "[b, Hk, N]", view.positions.shape, result.score)
    if result.columns:
        _check_values(method, function, result.columns, view)
    return result


def of_new_tokens(method: Method, new: NewTokens, group: int) -> dict[str, torch.Tensor]:
    """Return the columns that the method computes from new tokens. Raises PluginError for a column whose name or shape
    is wrong, and for a `GivenColumn` that is missing. group: query heads per KV head."""
    values, columns = method.on_tokens(new), method.columns()
    _check_names(method, "on_tokens", values, [column.name for column in expanded(columns, group)])
    given, shape = [column.name for column in columns if isinstance(column, GivenColumn)], new.keys.shape[:3]
    for name in (*values, *given):
        if _shape(value := values.get(name)) != shape:
            raise _wrong(method, "on_tokens", f" for column {quote(name)}", "[b, Hk, t]", shape, value)
    return values


def quotas_of(method: Method, allocation: Allocation) -> torch.Tensor | None:
    """Return the method's quotas. Raises PluginError unless they are None, or integers in the shape of
    `allocation.held`."""
    shares, shape = method.quotas(allocation), allocation.held.shape
    if shares is None:
        return None
    if _shape(shares) != shape:
        raise _wrong(method, "quotas", "", "[b, L, Hk]", shape, shares)
    if shares.is_floating_point() or shares.is_complex() or shares.dtype == torch.bool:
        raise PluginError(f"{type(method).__name__}.quotas() must return integers; got {shares.dtype}.")
    return shares


def _check_values(method: Method, function: str, values: Any, view: LayerView) -> None:
    """Raise PluginError unless `values` are new values of columns and states that the view shows."""
    _check_names(method, function, values, view.columns.keys() | view.states.keys())
    for name, value in values.items():
        if name in view.columns:
            kind, letters, shape = "column", "[b, Hk, N]", view.positions.shape
        else:
            kind, letters, shape = "state", "[b, *shape]", view.states[name].shape
        if _shape(value) != shape:
            raise _wrong(method, function, f" for {kind} {quote(name)}", letters, shape, value)


def _check_names(method: Method, function: str, values: Any, known: Collection[str]) -> None:
    """Raise PluginError unless `values` is a mapping whose names are all `known`."""
    who = f"{type(method).__name__}.{function}()"
    if not isinstance(values, Mapping):
        raise PluginError(f"{who} must return a dict of tensors by name; got {quote(type(values).__name__)}.")
    for name in values:
        if name not in known:
            names = ", ".join(quote(one) for one in sorted(known)) or "none"
            raise PluginError(
                f"{who} returns values for {quote(str(name))}, which is none of its declared names: {names}."
            )


def _shape(value: Any) -> torch.Size | None:
    return value.shape if isinstance(value, torch.Tensor) else None


def _wrong(method: Method, function: str, what: str, letters: str, shape: Sequence[int], value: Any) -> PluginError:
    """Return the error for a value that is no tensor of this shape. what: words for the value; letters: the shape as
    the docstrings write it."""
    got = f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else quote(type(value).__name__)
    wanted = f"a tensor {letters} = {list(shape)}"
    return PluginError(f"{type(method).__name__}.{function}() must return{what} {wanted}; got {got}.")
