"""Splits a rehearsal's ledger, the record of its memory over time, into segments at the borders of decoder layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from kvbench.engine.attention.interface import text_model
from kvbench.train.rehearsal import Ledger

FIRST, INNER, LAST = "the first layer", "an inner layer", "the last layer"


def layers_of(model: Any) -> list[nn.Module]:
    """Return the decoder layers of a model."""
    return list(text_model(model).layers)


@contextmanager
def marked(model: Any, ledger: Ledger) -> Iterator[None]:
    """Inside the `with` statement, begin a new segment of the ledger at every border of a decoder layer. A border is a
    moment when the forward pass enters or leaves a layer, or when the backward pass enters a layer."""
    layers = layers_of(model)
    hooks = []
    for index, layer in enumerate(layers):
        label = FIRST if index == 0 else LAST if index == len(layers) - 1 else INNER
        hooks.append(layer.register_forward_pre_hook(_entering(ledger, label)))
        hooks.append(layer.register_forward_hook(_leaving(ledger, label)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _entering(ledger: Ledger, label: str) -> Callable[..., None]:
    return lambda *_: ledger.mark(f"in {label}")


def _leaving(ledger: Ledger, label: str) -> Callable[..., None]:
    def left(module: Any, args: Any, out: Any) -> None:
        ledger.mark(f"after {label}")
        states = out[0] if isinstance(out, tuple) else out
        if states.requires_grad:
            states.register_hook(lambda _: ledger.mark(f"back through {label}"))

    return left
