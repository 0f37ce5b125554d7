"""A low-rank adapter (LoRA), which is active only while the model reads a probe.

    with adapted(model, weights):
        model(inputs_embeds=...)

Inside the `with` block, each linear layer that the adapter names computes W x + scaling B A x, where W is the layer's
weight.

An adapter of rank r has the tensors ``A.<layer>.<projection>`` [r, in], ``B.<layer>.<projection>`` [out, r] and
``scaling`` [1]. For example, ``A.3.q_proj`` belongs to the query projection of layer 3. Hu et al., LoRA,
arXiv 2106.09685. kvbench does not use peft here, because peft modifies the model: the prompt's keys and values must
stay bit-equal to those of the unmodified model.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

import torch

from kvbench.errors import SetupError, quote

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PLACE = re.compile(rf"(?:^|\.)layers\.(\d+)\.(?:.*\.)?({'|'.join(PROJECTIONS)})$")


def projections(model: Any) -> dict[str, torch.nn.Linear]:
    """Return the linear layers that an adapter may name, keyed by ``<layer>.<projection>``."""
    return {
        f"{found[1]}.{found[2]}": module
        for name, module in model.named_modules()
        if (found := _PLACE.search(name)) and hasattr(module, "in_features")  # nn.Linear, or peft's layer in a training
    }


def fit_adapter(shapes: Mapping[str, tuple[int, ...]], model: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of an adapter's tensors, corrected so that they fit the linear layers of `model`.

    `shapes` was derived from the model's configuration alone. The result leaves out projections that the model lacks,
    for example attention projections in layers without attention. The widths come from the model's layers, because
    `shapes` has wrong widths if attention has an output gate.
    """
    places = projections(model)
    fitted: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        part, _, place = name.partition(".")
        if part not in ("A", "B"):
            fitted[name] = shape
        elif (module := places.get(place)) is not None:
            fitted[name] = (shape[0], module.in_features) if part == "A" else (module.out_features, shape[1])
    return fitted


@contextlib.contextmanager
def adapted(model: Any, weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Apply an adapter in every forward pass inside the `with` block.

    weights: the adapter's tensors, named as the module's docstring says. Raises SetupError when the adapter names a
    layer that the model lacks, or has tensors that do not fit the layer's shape.
    """
    places = projections(model)
    hooks = []
    try:
        for name in (key[2:] for key in weights if key.startswith("A.")):
            module = places.get(name)
            if module is None:
                raise SetupError(
                    f"the method's adapter changes the linear layer {quote(name)}, which this model does not have. "
                    "Use weights that were trained for this model."
                )
            a, b = weights[f"A.{name}"], weights[f"B.{name}"]
            if (a.shape[1], b.shape[0]) != (module.in_features, module.out_features):
                ours, theirs = [module.in_features, module.out_features], [a.shape[1], b.shape[0]]
                raise SetupError(
                    f"the method's adapter of layer {quote(name)} maps {theirs[0]} to {theirs[1]} features, but the "
                    f"model's layer maps {ours[0]} to {ours[1]}. Use weights that were trained for this model."
                )
            where = next(chain(module.parameters(), module.buffers()), a).device  # quantised layers have buffers
            hooks.append(module.register_forward_hook(_add(*(x.to(where) for x in (a, b, weights["scaling"])))))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _add(a: torch.Tensor, b: torch.Tensor, scaling: torch.Tensor) -> Any:
    def hook(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        x = inputs[0].to(a.dtype)
        return output + (scaling * (x @ a.T @ b.T)).to(output.dtype)

    return hook
