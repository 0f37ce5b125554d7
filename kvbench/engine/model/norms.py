"""Faster RMS norms on a CPU: torch's own operator in place of the model's code, with the same bits.

A model's RMS norm calls six operators from Python. torch's operator computes the same steps in one call, which takes
two thirds of the time. A norm uses torch's operator only if a trial gives the same bits as the model's own code. Norms
that add 1 to their weight, for example, stay as they are.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvbench.engine.model.packing import replaced

Norm = Callable[[torch.Tensor], torch.Tensor]


@contextlib.contextmanager
def fused_norms(model: Any) -> Iterator[int]:
    """Inside the `with` block, use torch's operator in the RMS norms of a float32 model on a CPU. Yields the number of
    norms that use it."""
    first = next(model.parameters(), None)
    modules = model.modules() if first is not None and first.device.type == "cpu" else ()
    fused = {module: norm for module in modules if (norm := _fused(module)) and _equal(module, norm)}
    with replaced(fused):
        yield len(fused)


def _fused(module: Any) -> Norm | None:
    """Return torch's RMS norm with a module's weight and epsilon; None if the module cannot be an RMS norm, or if its
    weight is not a float32 tensor on a CPU."""
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(epsilon, float):
        return None
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    if len(parameters) != 1 or weight is None or weight.dim() != 1:
        return None
    inputs = _parameters(type(module).forward)
    if len(inputs) != 2 or any(i.kind is i.VAR_POSITIONAL for i in inputs):  # self and x; some norms also take a gate
        return None
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return None
    return lambda x: torch.rms_norm(x, weight.shape, weight, epsilon)


@functools.cache
def _parameters(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    return tuple(inspect.signature(function).parameters.values())


def _equal(module: Any, norm: Norm) -> bool:
    """Return whether `norm` and the module give the same bits for random vectors of several magnitudes."""
    generator, size = torch.Generator().manual_seed(0), module.weight.shape[0]
    x = torch.randn(8, 1, size, generator=generator) * torch.logspace(-3, 3, 8)[:, None, None]
    return torch.equal(module(x), norm(x))
