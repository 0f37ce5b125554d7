"""Runs code on the meta device, where tensors have a size and no memory, and counts the bytes that they would take.

Meta tensors have no values. When the code reads a value, it gets one from `Answers`: False for a bool, but True for the
result of `all`; 1 for a float; `Answers.number` for an integer. When it reads the indices of a mask's True elements,
`Answers.marked` decides how many there are.

Not counted: scratch memory inside an operator, and what an allocator adds.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvbench.engine.model.activations import LiveBytes

META = torch.device("meta")
aten: Any = torch.ops.aten
ALL = {aten.all.default, aten.all.dim}
READS = {aten._local_scalar_dense.default, aten.item.default}
_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
ANSWERS: Mapping[torch.dtype, Any] = {torch.bool: False, torch.float32: 1.0, torch.float64: 1.0}


@dataclass(frozen=True, slots=True)
class Answers:
    """The values that code gets when it reads a meta tensor.

    Attributes:
        number: the value of every integer.
        marked: function (size of a mask's last axis) -> how many elements along this axis are True.
    """

    number: int = 1
    marked: Callable[[int], int] = lambda length: length

    def value(self, tensor: torch.Tensor) -> Any:
        return ANSWERS.get(tensor.dtype, 1.0 if tensor.is_floating_point() else self.number)

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a CPU tensor with the shape and dtype of a meta tensor, filled with the value for its dtype."""
        return torch.full(tensor.shape, self.value(tensor), dtype=tensor.dtype)

    def places(self, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return stand-ins for the indices of the True elements of a mask, one tensor per dimension."""
        count = math.prod(mask.shape[:-1]) * self.marked(mask.shape[-1]) if mask.dim() else 1
        return tuple(torch.empty(count, dtype=torch.int64, device=mask.device) for _ in mask.shape)


class MetaBytes(LiveBytes):
    """Counts the live bytes of tensors, and supplies a value when code reads a meta tensor.

    answers: the values that the code gets. most_reads: how often the code may read a value; None: without limit. A
    further read raises RecursionError, because a loop that waits for another value would never end.
    """

    def __init__(self, answers: Answers, most_reads: int | None = None) -> None:
        super().__init__({})
        self.answers = answers
        self._reads_left = most_reads
        self._all: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()  # results of `all`

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.is_inference_mode_enabled() and func._can_decompose():  # elsewhere autograd has decomposed it
            with self:
                return func.decompose(*args, **(kwargs or {}))
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and first.is_meta:
            if func in READS:
                self._count_read()
                return first.untyped_storage() in self._all or self.answers.value(first)
            if func is aten._to_copy.default and torch.device((kwargs or {}).get("device") or "meta").type != "meta":
                self._count_read()
                whole = first.untyped_storage() in self._all
                return torch.ones(first.shape, dtype=first.dtype) if whole else self.answers.values(first)
            if func is aten.nonzero.default:
                self._count_read()
                return torch.stack(self.answers.places(first), dim=1)
            if func in _INDEXED:
                args = [first, _as_numbers(args[1], self.answers), *args[2:]]
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func in ALL and out.is_meta:
            self._all.add(out.untyped_storage())
        return out

    def _count_read(self) -> None:
        if self._reads_left is not None:
            self._reads_left -= 1
            if self._reads_left < 0:
                raise RecursionError("the code reads values of meta tensors too often, as if in an endless loop.")


def _as_numbers(indices: Sequence[Any], answers: Answers) -> list[Any]:
    """Return the index of an indexing operation, one item per axis, with integer indices in place of each mask.
    `answers` says how many elements of a mask are True."""
    numbers: list[Any] = []
    for index in indices:
        masks = isinstance(index, torch.Tensor) and index.dtype == torch.bool
        numbers += answers.places(index) if masks else [index]
    return numbers
