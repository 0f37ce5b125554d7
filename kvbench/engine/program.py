"""A decode step on a CPU, compiled as one program of C++ code.

A step of a small model has some 500 operations. If Python calls them one by one, each call takes longer than the
arithmetic of its operation. torch's compiler writes the operations as one program: all operations between two matrix
products become one loop, and Python makes only one call. The program rounds differently from the operations, so results
differ in the last bits. The bits of a slot's result depend on the number of slots, never on the other slots' sequences.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import _inductor
from torch._subclasses import FakeTensorMode

from kvbench.console import faults
from kvbench.engine.graph import CaptureError
from kvbench.engine.model.packing import packs
from kvbench.engine.recording import Recording

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}  # of a logit, relative to the largest
MOST_ELEMENTS = 1 << 22  # of a tensor; larger tensors are not compared element by element to see whether they overlap


class _Compiled(NamedTuple):
    kind: tuple[Any, ...]  # two steps of the same kind share the program
    program: Callable[..., tuple[torch.Tensor]]


# The newest program of each model. Only the newest, because a program may hold a second copy of the weights.
_newest: WeakKeyDictionary[Any, _Compiled] = WeakKeyDictionary()


def forget(model: Any) -> None:
    """Free the newest program of a model."""
    _newest.pop(model, None)


class StepProgram:
    """A decode step compiled as one program. Each call runs a step and returns its logits.

    Compiling takes seconds. If the newest program of this model was compiled for the same operations, weights, sizes
    and number of threads, that program is used again.

    Args:
        step: runs a step, and returns its logits [S, V]. It must be a function of tensors that are never reallocated.
        model: the model that the step runs. Its weights must not change afterwards.
        slots: number of slots, S.
        restore: resets the tensors that a step changes. It is called between three runs: two of `step`, to see
            that its operations are the same again, and one of the program, to compare the logits. After the last run,
            and after a failure, the caller must reset the tensors.

    Raises CaptureError when the step cannot be recorded (see `Recording`) or compiled, when its second run has other
    operations, when tensors that it changes share memory, and when the program's logits differ from the step's.
    """

    def __init__(self, step: Callable[[], torch.Tensor], model: Any, slots: int, restore: Callable[[], object]) -> None:
        constants = [*model.parameters(), *model.buffers()]
        recording = Recording(step, constants)
        restore()
        if not recording.same_as(Recording(step, constants)):
            raise CaptureError("the step has other operations when it runs a second time")
        if _overlap(recording.changed):
            raise CaptureError("the step changes tensors that share memory")
        self._inputs = recording.inputs
        self._program = _compiled(recording, model, packs(model, slots))
        restore()
        _compare(self(), recording.result)

    def __call__(self) -> torch.Tensor:
        return self._program(*self._inputs)[0]


def _compiled(recording: Recording, model: Any, packed: bool) -> Callable[..., tuple[torch.Tensor]]:
    """Return the program of the recorded operations. packed: let the program hold packed copies of the weights."""
    held = [(id(t), t.data_ptr(), None if t.is_inference() else t._version) for t in recording.constants]
    shapes = [(tuple(t.shape), t.stride(), t.dtype) for t in recording.inputs]
    kind = (str(recording.module.graph), tuple(held), tuple(shapes), packed, torch.get_num_threads())
    before = _newest.get(model)
    if before is not None and before.kind == kind:
        return before.program
    del before
    forget(model)  # frees the old program's weights before the new program makes its own
    with FakeTensorMode():  # without memory; each apart from the others, as `_overlap` has checked
        examples: list[Any] = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in recording.inputs]
    options = {"freezing": packed, "cpp_wrapper": True, "compile_threads": 1}
    try:
        with torch.no_grad(), _quiet():
            program: Any = _inductor.compile(recording.module, examples, options=options)
    except Exception as error:  # whatever the compiler raises
        if faults.of_machine(error):
            raise
        raise CaptureError(f"torch cannot compile the step: {faults.first_line(error)}") from error
    _newest[model] = _Compiled(kind, program)
    return program


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Inside the `with` block, torch does not log the traceback of an operation that it cannot compile."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


def _compare(logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise CaptureError if the program's logits differ from those of the plain step by more than rounding explains."""
    finite = expected[expected.isfinite()]
    allowed = TOLERANCE[expected.dtype] * float(finite.abs().max()) if finite.numel() else 0.0
    if not torch.allclose(logits.float(), expected.float(), rtol=0, atol=allowed, equal_nan=True):
        raise CaptureError("the logits of the compiled step differ from those of the plain step")


def _overlap(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether two of the tensors share memory. For large tensors, and for elements of different sizes, return
    instead whether the memory that one tensor spans overlaps the memory that the other spans."""
    spans = sorted(((t.data_ptr(), t.data_ptr() + _span(t) * t.element_size(), t) for t in tensors), key=itemgetter(0))
    return any(end > start and _share(s, t) for (_, end, s), (start, _, t) in itertools.combinations(spans, 2))


def _span(tensor: torch.Tensor) -> int:
    """Return the number of elements from the tensor's first to its last in memory, those between them included."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    if max(_span(a), _span(b)) > MOST_ELEMENTS or a.element_size() != b.element_size():
        return True
    return bool(torch.isin(_addresses(a), _addresses(b)).any())


def _addresses(tensor: torch.Tensor) -> torch.Tensor:
    """Return the address of every element."""
    return tensor.data_ptr() + tensor.element_size() * torch.arange(_span(tensor)).as_strided(
        tensor.shape, tensor.stride()
    )
