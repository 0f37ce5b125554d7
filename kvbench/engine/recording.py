"""Records the tensor operations of a function as a graph, while they run. The engine compiles the graph of a step."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from kvbench.engine.graph import CaptureError

_VARIES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_READS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__)
_MASKS = (torch.bool, torch.uint8)  # with an index of these types, the shape of the result may change at each step


class Recording:
    """The operations of one call of a function without arguments.

    Args:
        step: the function. It returns one tensor. At every call it must run the same operations on the same tensors.
        constants: tensors that no operation changes, such as weights.

    Attributes:
        module: runs the recorded operations; takes `inputs` as arguments, returns a tuple of one tensor, and holds
            those constants that the operations read.
        inputs: all other tensors that the operations read or change, except those that the operations made.
        changed: those of `inputs` in whose memory the operations write.
        constants: the constants in `module`.
        result: what the recorded call returned.

    Raises CaptureError when the host reads a tensor, when the shape of a result depends on the values of a tensor, when
    an operation draws random numbers, and when the step makes a tensor from Python numbers: other calls may then run
    other operations.
    """

    def __init__(self, step: Callable[[], torch.Tensor], constants: Iterable[torch.Tensor]) -> None:
        mode = _Mode(constants)
        with _HostReads(), mode:
            self.result = step()
        mode.graph.output((mode.node(self.result),))
        self.module = torch.fx.GraphModule(mode.constants, mode.graph)
        self.constants, self.inputs = list(mode.constants.values()), mode.inputs
        self.changed = [t for t in mode.inputs if t.untyped_storage().data_ptr() in mode.changed]

    def same_as(self, other: Recording) -> bool:
        """Return whether both recorded the same operations on the same tensors."""
        read = ((r.inputs, r.constants) for r in (self, other))
        same = all(len(a) == len(b) and all(map(operator.is_, a, b)) for a, b in zip(*read))
        return same and str(self.module.graph) == str(other.module.graph)


class _HostReads(TorchFunctionMode):
    """Refuses, inside its `with` block, the calls in `_READS`.

    By these calls the host reads a tensor without an operation that `_Mode` could record.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _READS:
            raise CaptureError(f"the step calls Tensor.{function.__name__}, so the host reads a tensor")
        return function(*args, **(kwargs or {}))


class _Mode(TorchDispatchMode):
    """Runs every operation inside its `with` block, and adds the operation to `graph`."""

    def __init__(self, constants: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.graph = torch.fx.Graph()
        self.inputs: list[torch.Tensor] = []
        self.constants: dict[str, torch.Tensor] = {}
        self.changed: set[int] = set()  # addresses of the storages that operations write to
        self._are_constant = {id(tensor) for tensor in constants}
        self._nodes = WeakTensorKeyDictionary()  # of each tensor that still exists, so that results can be freed
        self._first: torch.fx.Node | None = None  # the first operation; inputs stand before it

    def node(self, tensor: torch.Tensor) -> torch.fx.Node:
        """Return the node that stands for a tensor. A tensor without a node gets one, as a constant or an input."""
        if tensor not in self._nodes:
            with self.graph.inserting_before(self._first):
                if id(tensor) in self._are_constant:
                    name = f"constant_{len(self.constants)}"
                    self.constants[name] = tensor
                    made = self.graph.create_node("get_attr", name)
                else:
                    made = self.graph.placeholder(f"input_{len(self.inputs)}")
                    self.inputs.append(tensor)
            self._add(tensor, made)
        node: torch.fx.Node = self._nodes[tensor]
        return node

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # an operation that consists of other operations is recorded as those
            out = function.decompose(*args, **kwargs)
        return self._record(function, args, kwargs) if out is NotImplemented else out

    def _record(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _check(function, args)
        parameters = function._schema.arguments
        given = {parameter.name: value for parameter, value in zip(parameters, args)} | kwargs
        written = [given.get(p.name) for p in parameters if p.alias_info is not None and p.alias_info.is_write]
        self.changed |= {t.untyped_storage().data_ptr() for t in tree_iter(written) if isinstance(t, torch.Tensor)}
        named = tree_map_only(torch.Tensor, self.node, (args, kwargs))
        out = function(*args, **kwargs)
        made = self.graph.call_function(function, *named)
        self._first = made if self._first is None else self._first
        if isinstance(out, torch.Tensor):
            self._add(out, made)
        elif isinstance(out, (tuple, list)):
            for place, part in enumerate(out):
                if isinstance(part, torch.Tensor):
                    self._add(part, self.graph.call_function(operator.getitem, (made, place)))
        return out

    def _add(self, tensor: torch.Tensor, node: torch.fx.Node) -> None:
        if tensor not in self._nodes:  # else an operation changed the tensor in place
            self._nodes[tensor] = node


def _check(function: Any, args: tuple[Any, ...]) -> None:
    """Raise CaptureError if a recording of the operation `function` may be wrong for later calls of the step.

    This is so if the operation makes a tensor from Python numbers, if it draws random numbers, or if the values of a
    tensor decide the shape of its result or a Python value that it returns.
    """
    aten = torch.ops.aten
    if function is aten.lift_fresh.default:
        raise CaptureError("the step makes a tensor from Python numbers, which a compiled program could not change")
    if torch.Tag.nondeterministic_seeded in function.tags:
        raise CaptureError(f"the step's code calls {function}, which draws random numbers")
    if function is aten.index.Tensor:
        varies = any(isinstance(t, torch.Tensor) and t.dtype in _MASKS for t in tree_iter(args[1]))
    else:
        varies = any(tag in function.tags for tag in _VARIES)
    if varies:
        raise CaptureError(f"the step's code calls {function}, whose shape or Python value may change at each step")
