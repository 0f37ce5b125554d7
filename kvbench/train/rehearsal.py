"""A rehearsal of a training's computations on the meta device, where tensors have a size and no memory.

The recipe's own code runs; every tensor that an operation returns is counted from its creation until the code drops it.
Meta tensors have no values. Where the code reads a value, a rehearsal supplies one: False for a bool, but True for the
result of `all`; 1 for a float; `Answers.number` for an integer; and `Answers.marked` says how many elements of a mask
are True.

Not counted: scratch memory inside an operator, and what an allocator adds.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kvbench.engine.model.activations import LiveBytes
from kvbench.engine.model.load import LoadedModel

aten: Any = torch.ops.aten
Kind = Callable[[torch.Tensor], str]  # names the part of a plan to which a tensor belongs
Parts = Counter[str]  # bytes by part
ALL = {aten.all.default, aten.all.dim}
READS = {aten._local_scalar_dense.default, aten.item.default}
COPIES, LOGITS, CACHE = "scratch as large as weights", "logits", "keys and values"
ATTENTION, ACTIVATIONS = "attention tables", "activations"
ANSWERS: Mapping[torch.dtype, Any] = {torch.bool: False, torch.float32: 1.0, torch.float64: 1.0}


@dataclass(frozen=True, slots=True)
class Answers:
    """The values that a rehearsal supplies where the code reads a meta tensor.

    Attributes:
        number: the value of every integer.
        marked: how many elements of a row of a mask are True, as a function of the row's length.
    """

    number: int = 1
    marked: Callable[[int], int] = lambda length: length

    def value(self, tensor: torch.Tensor) -> Any:
        return ANSWERS.get(tensor.dtype, 1.0 if tensor.is_floating_point() else self.number)

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a CPU tensor with the shape and dtype of a meta tensor, filled with the supplied value."""
        return torch.full(tensor.shape, self.value(tensor), dtype=tensor.dtype)

    def places(self, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return stand-ins for the indices of the True elements of a mask, one tensor per dimension."""
        count = math.prod(mask.shape[:-1]) * self.marked(mask.shape[-1]) if mask.dim() else 1
        return tuple(torch.empty(count, dtype=torch.int64, device=mask.device) for _ in mask.shape)


class Segment(NamedTuple):
    """A segment of a computation, from one mark to the next.

    label: the mark at which it began. points: records of the live bytes by part, the first made at the mark, one more
    whenever a tensor was created.
    """

    label: str
    points: list[Parts]

    @property
    def peak(self) -> Parts:
        return max(self.points, key=lambda parts: parts.total())


class Ledger(LiveBytes):
    """Counts the live bytes of meta tensors by part (weights, activations, ...), and records them in segments.

    A segment lasts from one call of `mark` to the next. kind: returns the part of a new tensor; `name` can move the
    tensor to another part later. answers: the values that the code reads from meta tensors.
    """

    def __init__(self, kind: Kind, answers: Answers) -> None:
        super().__init__({})
        self.kind, self.answers = kind, answers
        self.parts: Parts = Counter()
        self.segments: list[Segment] = []
        self._named: weakref.WeakKeyDictionary[torch.UntypedStorage, list[str]] = weakref.WeakKeyDictionary()
        self._all: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()  # results of `all`
        self.mark("")

    def mark(self, label: str) -> None:
        """End the current segment and begin one with this label."""
        self.segments.append(Segment(label, [Counter(self.parts)]))

    def taken(self) -> list[Segment]:
        """Return the segments since the last call, and begin a new one."""
        done, self.segments = self.segments, []
        self.mark("")
        return done

    def name(self, tensors: Iterable[torch.Tensor], part: str) -> None:
        """Count these tensors in the part with this name from now on, also tensors made before the ledger's block."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.is_meta and (known := self._named.get(storage)) is not None:
                self.parts[known[0]] -= storage.nbytes()
                self.parts[part] += storage.nbytes()
                known[0] = part
            elif tensor.is_meta:
                self._add(storage, part)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.is_inference_mode_enabled() and func._can_decompose():  # else autograd has done this before
            with self:
                return func.decompose(*args, **(kwargs or {}))
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and first.is_meta:
            if func in READS:
                return first.untyped_storage() in self._all or self.answers.value(first)
            if func is aten._to_copy.default and torch.device((kwargs or {}).get("device") or "meta").type != "meta":
                return self.answers.values(first)
            if func is aten.nonzero.default:
                return torch.stack(self.answers.places(first), dim=1)
            if func in _INDEXED:
                args = [first, _as_numbers(args[1], self.answers), *args[2:]]
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func in ALL and out.is_meta:
            self._all.add(out.untyped_storage())
        return out

    def _count(self, tensor: torch.Tensor) -> None:
        if tensor.is_meta:
            self._add(tensor.untyped_storage(), self.kind(tensor))

    def _add(self, storage: torch.UntypedStorage, part: str) -> None:
        size, named = storage.nbytes(), [part]
        self._known.add(storage)  # also if no operation inside the block made it
        self._named[storage] = named
        self.now += size
        self.parts[part] += size
        self.segments[-1].points.append(Counter(self.parts))
        weakref.finalize(storage, self._forget, size, named)

    def _forget(self, size: int, named: list[str]) -> None:
        self.now -= size
        self.parts[named[0]] -= size


_INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


def _as_numbers(indices: Sequence[Any], answers: Answers) -> list[Any]:
    """Return the indices of an indexed tensor with every mask replaced by integer indices, as many as it has True
    elements according to `answers`."""
    numbers: list[Any] = []
    for index in indices:
        masks = isinstance(index, torch.Tensor) and index.dtype == torch.bool
        numbers += answers.places(index) if masks else [index]
    return numbers


def part_by_shape(loaded: LoadedModel) -> Kind:
    """Return a function that tells from a tensor's shape in which part of memory a ledger counts the tensor."""
    parameters = {p.shape for p in loaded.model.parameters()}
    vocabulary = loaded.model.get_input_embeddings().weight.shape[0]
    heads = {(g.kv_heads, size) for g in loaded.geometry for size in (g.head_dim, g.value_dim)}
    widths = {size for shape in parameters for size in shape}
    widths |= {part for _, size in heads for part in (size, size // 2)}

    def part(tensor: torch.Tensor) -> str:
        shape = tensor.shape
        if shape in parameters:
            return COPIES
        if vocabulary in shape:
            return LOGITS
        if len(shape) == 4 and (shape[1], shape[-1]) in heads:
            return CACHE
        return ATTENTION if len(shape) > 2 and shape[-1] not in widths else ACTIVATIONS

    return part
