"""Counts the memory of a training's computations on the meta device, where tensors have a size but no values.

The recipe's own code runs; every tensor that an operation returns is counted from its creation until the code drops it.
Where the code reads values of these tensors, it gets made-up ones (`kvbench.engine.meta.Answers`).

Not counted: scratch memory inside an operator, and what an allocator adds.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from kvbench.engine.meta import Answers, MetaBytes
from kvbench.engine.model.load import LoadedModel

Kind = Callable[[torch.Tensor], str]  # returns the name of the part of memory to which a tensor belongs
Parts = Counter[str]  # bytes by part
COPIES, LOGITS, CACHE = "scratch as large as weights", "logits", "keys and values"
ATTENTION, ACTIVATIONS = "attention tables", "activations"


class Segment(NamedTuple):
    """A segment of a computation: what happens between two calls of `Ledger.mark`.

    label: the label passed to the first of these calls. points: for each part of memory (weights, activations, ...) the
    bytes in use, recorded at the beginning and after each new tensor.
    """

    label: str
    points: list[Parts]

    @property
    def peak(self) -> Parts:
        return max(self.points, key=lambda parts: parts.total())


class Ledger(MetaBytes):
    """Counts the bytes of meta tensors in use, by part of memory (weights, ...), and records them in segments.

    A segment lasts from one call of `mark` to the next. kind: decides to which part a new tensor belongs; the method
    `name` can move it to another part. answers: the values that the code gets when it reads meta tensors.
    """

    def __init__(self, kind: Kind, answers: Answers) -> None:
        super().__init__(answers)
        self.kind = kind
        self.parts: Parts = Counter()
        self.segments: list[Segment] = []
        self._named: weakref.WeakKeyDictionary[torch.UntypedStorage, list[str]] = weakref.WeakKeyDictionary()
        self.mark("")

    def mark(self, label: str) -> None:
        """End the current segment and begin a new segment with this label."""
        self.segments.append(Segment(label, [Counter(self.parts)]))

    def taken(self) -> list[Segment]:
        """Return the segments since the last call of this method, and begin a new segment."""
        done, self.segments = self.segments, []
        self.mark("")
        return done

    def name(self, tensors: Iterable[torch.Tensor], part: str) -> None:
        """Count these tensors, if they are meta tensors, in the part `part` from now on. This includes tensors made
        before the ledger began to count."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.is_meta and (known := self._named.get(storage)) is not None:
                self.parts[known[0]] -= storage.nbytes()
                self.parts[part] += storage.nbytes()
                known[0] = part
            elif tensor.is_meta:
                self._add(storage, part)

    def _count(self, tensor: torch.Tensor) -> None:
        if tensor.is_meta:
            self._add(tensor.untyped_storage(), self.kind(tensor))

    def _add(self, storage: torch.UntypedStorage, part: str) -> None:
        size, named = storage.nbytes(), [part]
        self._known.add(storage)  # known even if it was made while the ledger did not count
        self._named[storage] = named
        self.now += size
        self.parts[part] += size
        self.segments[-1].points.append(Counter(self.parts))
        weakref.finalize(storage, self._forget, size, named)

    def _forget(self, size: int, named: list[str]) -> None:
        self.now -= size
        self.parts[named[0]] -= size


def part_by_shape(loaded: LoadedModel) -> Kind:
    """Return a function that decides by a tensor's shape to which part of memory a ledger counts the tensor."""
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
