"""Faster linear layers on a CPU: weights packed once for oneDNN's matrix product of few rows.

A decode step multiplies a few rows (one per slot) with every weight matrix. torch's default product packs the weights
again in each call; with 2 to 32 rows, packing takes 1.1 to 4 times as long as the product. bfloat16 weights are packed
on processors for which oneDNN has a bfloat16 product, because packed weights are then faster even for a single row.
Like default layers, packed layers give a row the same bits at any place in the batch and beside any other rows; but
packed and default layers differ in the last bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

FEWEST_ROWS = {torch.float32: 2, torch.bfloat16: 1}  # with fewer rows, the default product is faster
FEWEST_WEIGHTS = 1 << 17  # per layer; for smaller layers, the overhead of the call outweighs the gain
MOST_BYTES = 1 << 30  # weights of a model; larger models are not packed, because packing makes a second copy


@contextlib.contextmanager
def packed_linears(model: Any, rows: int) -> Iterator[int]:
    """Inside the `with` block, use packed weights in the large linear layers of a model on a CPU.

    rows: rows of the layers' inputs, one per slot; the weights are packed for this number. Yields the number of packed
    layers. No layer is packed

    - on other devices,
    - for quantised weights or weights of several dtypes,
    - in a dtype for which oneDNN has no product on this processor,
    - with fewer rows than `FEWEST_ROWS`,
    - for models larger than `MOST_BYTES`.
    """
    layers = large_linears(model) if packs(model, rows) else []
    with replaced({layer: _forward(layer, rows) for layer in layers}):
        yield len(layers)


@contextlib.contextmanager
def replaced(forwards: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Inside the `with` block, each module in `forwards` runs `forwards[module]` in place of its own `forward`."""
    try:
        for module, forward in forwards.items():
            module.forward = forward
        yield
    finally:
        for module in forwards:
            module.__dict__.pop("forward", None)


def large_linears(model: Any) -> list[Any]:
    """Return the linear layers of a model that are large enough for packing."""
    return [m for m in model.modules() if type(m) is torch.nn.Linear and m.weight.numel() >= FEWEST_WEIGHTS]


def packed_from(bytes_of_all: int, dtype: torch.dtype) -> int | None:
    """Return the smallest number of rows for which a model's large linear layers are packed on a CPU; None: never.
    bytes_of_all: bytes of all weights of the model; they must not be quantised."""
    usable = torch.backends.mkldnn.is_available() and bytes_of_all <= MOST_BYTES
    if dtype == torch.bfloat16 and not (usable and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return None
    return FEWEST_ROWS.get(dtype) if usable else None


def packs(model: Any, rows: int) -> bool:
    """Return whether `packed_linears` packs this model's large linear layers, if any, for inputs of `rows` rows."""
    parameters = list(model.parameters())
    dtype = parameters[0].dtype
    fewest = packed_from(sum(p.numel() * p.element_size() for p in parameters), dtype)
    plain = all(p.device.type == "cpu" and p.dtype == dtype and type(p.data) is torch.Tensor for p in parameters)
    return plain and fewest is not None and rows >= fewest


def _forward(layer: torch.nn.Linear, rows: int) -> Any:
    weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), rows)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, weight, layer.bias, "none", [], "")

    return forward
