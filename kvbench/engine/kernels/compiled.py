"""Decoder layers compiled by torch: norm, RoPE, gate and residual between two matrix products become one kernel.

The layers are transformers' own. Attention and cache are not compiled: they stay in the function that `interface.route`
registers. In bfloat16 compiled layers round less often than plain ones, so results differ in the last bits. The bits of
a slot's result depend on the number of slots, never on the other slots' sequences.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._dynamo import config
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

from kvbench.console import faults
from kvbench.engine.attention.interface import text_model
from kvbench.engine.model.packing import replaced

# How often torch may compile a layer's code. It compiles the code anew for another model, another kind of layer, each
# layer that keeps a state, and another number of slots. torch's default is 8 times.
VARIANTS = 512


class CompiledLayers:
    """A model's decoder layers, compiled by torch.

    The model runs them inside `with layers.active():`; outside this block it runs its own plain layers.

    The first forward pass with inputs of new shapes compiles the layers. This takes seconds to a minute, so the pass
    must run before a graph is captured. If compiling fails, the rest of the pass and all later passes run the plain
    layers.

    Args:
        model: the causal language model.
        warn: called once, with the reason, when the layers cannot be compiled.
    """

    def __init__(self, model: Any, warn: Callable[[str], None]) -> None:
        layers: list[Any] = list(getattr(text_model(model), "layers", []))
        self.warn, self.failed = warn, False
        self._forwards = {
            layer: self._either(layer.forward, torch.compile(layer.forward, dynamic=False)) for layer in layers
        }
        if not layers:
            self._fail(f"kvbench finds no list of decoder layers in {type(model).__name__}")

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """While the `with` block runs, make the model run its compiled layers."""
        forwards = {} if self.failed else self._forwards
        with replaced(forwards), config.patch(recompile_limit=VARIANTS, fail_on_recompile_limit_hit=True):
            yield

    def _either(self, plain: Callable[..., Any], compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs the compiled layer, or the plain one after torch failed to compile a layer."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self.failed:
                try:
                    return compiled(*args, **kwargs)
                except (TorchDynamoException, FailOnRecompileLimitHit) as error:
                    if faults.of_machine(error):
                        raise
                    self._fail(f"torch.compile failed: {faults.first_line(error)}")
            return plain(*args, **kwargs)  # after a failure, `plain` begins anew and writes the same entries again

        return forward

    def _fail(self, reason: str) -> None:
        self.failed = True
        self.warn(f"the model's layers run uncompiled: {reason}")
