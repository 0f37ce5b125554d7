"""Results of operators on meta tensors, remembered by the operator and the sizes of its arguments.

A plan runs the same operators on tensors of the same sizes many times. For most operators torch computes the size of a
result in Python. This takes several times as long as a look-up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

MOST = 100_000  # remembered calls; a further one makes room by forgetting all
GROUPED: Any = torch.ops.aten._grouped_mm.default
_SAME = "the first argument"  # the result of an operator in place
_known: dict[Any, Any] = {}  # call -> `_SAME`, or a `Size`, or a list or tuple of them


class Size(NamedTuple):
    """The shape, strides and dtype of a meta tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Size:
        return cls(tensor.shape, tensor.stride(), tensor.dtype)

    def new(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


def call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return ``func(*args, **kwargs)``. If the result of an equal call is remembered, do not run `func`.

    The result is then new meta tensors of the remembered sizes, or the first argument if the operator works in place.
    Two calls are equal if the function and the keys of all arguments are equal (`_described`).
    """
    try:
        made = func, _described(args), _described(tuple(kwargs.items()))
        known = _known.get(made)
    except TypeError:  # a tensor with values, or an argument that cannot be hashed
        return _run(func, args, kwargs)
    if known is None:
        out = _run(func, args, kwargs)
        if (result := _result(made[1], args, kwargs, out)) is not None:
            if len(_known) >= MOST:
                _known.clear()
            _known[made] = result
        return out
    if known is _SAME:
        return args[0]
    if isinstance(known, Size):
        return known.new()
    return type(known)(size.new() for size in known)


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return ``func(*args, **kwargs)``. On the meta device, torch's product of experts accepts only bfloat16, but other
    devices accept other dtypes too. So run it there in bfloat16, and return a result of the arguments' dtype."""
    if func is not GROUPED or not args[0].is_meta:
        return func(*args, **kwargs)
    accepted = (a.bfloat16() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)
    return func(*accepted, **kwargs).to(args[0].dtype)


def _described(argument: Any) -> Any:
    """Return a key by which results are remembered for an argument.

    The key of a meta tensor is its size. The key of a list is the keys of its items. The key of another value is its
    type and the value.

    Raises TypeError for a tensor with values.
    """
    if isinstance(argument, torch.Tensor):
        if not argument.is_meta:
            raise TypeError("the result may depend on the values of a tensor, so it cannot be remembered")
        return Size.of(argument)
    if isinstance(argument, (list, tuple)):
        return tuple(map(_described, argument))
    return type(argument), argument  # 1 and 1.0 are equal and give results of other dtypes


def _result(described: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
    """Return what is remembered of an operation's result on the meta device; None if it may not be remembered. It may
    not, for example, if the result is a view, or if the call changed the size of an argument."""
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if not given or described != _described(args):
        return None
    if out is args[0]:
        return _SAME
    made = out if isinstance(out, (list, tuple)) else [out]
    if not made:
        return None
    storages = [tensor.untyped_storage() for tensor in given]
    for tensor in made:
        if not (isinstance(tensor, torch.Tensor) and tensor.is_meta):
            return None
        storage = tensor.untyped_storage()
        if (
            any(storage is one for one in storages)
            or storage.nbytes() != Size.of(tensor).new().untyped_storage().nbytes()
        ):
            return None
    return Size.of(out) if made[0] is out else type(out)(map(Size.of, made))
